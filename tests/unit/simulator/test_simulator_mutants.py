"""The schedules can fail: with any one guard removed, some do."""

from collections.abc import Callable
from typing import Any

import pytest

from controller.fleet.liveness import Liveness
from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger import invariants
from controller.ledger.decisions import commands, leases, membership, steps
from controller.ledger.decisions.commands import command, of_worker
from controller.ledger.enums import VoteOutcome
from controller.ledger.state.fleet import Fleet, Worker
from controller.ledger.state.seats import Seats
from controller.ledger.state.tasks import Task
from controller.ledger.state.versions import Versions
from controller.ledger.step_metrics import step_metrics
from controller.store.group_commit import GroupCommit
from paceline.ids import Version
from testbed.simulator.faults import run_schedule

pytestmark = pytest.mark.heavy  # schedules until one fails

SEEDS = range(1000)


def first_failure(known: int = SEEDS[0], **options: Any) -> int | None:
    """The first seed that fails; ``known`` is tried before the others."""
    for seed in (known, *SEEDS):
        try:
            run_schedule(seed, **options)
        except (AttributeError, NameError, TypeError):
            raise  # of the mutant itself
        except Exception:
            return seed
    return None


def no_owner_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Task, "leased_as", lambda task, attempt, _: task.leased and task.attempt == attempt
    )


def no_incarnation_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commands, "caller", lambda s, worker_id, incarnation: s.fleet.workers[worker_id])


def no_staleness_check(patch: pytest.MonkeyPatch) -> None:
    """Neither at acceptance nor when a step opens."""
    patch.setattr(Versions, "staleness", lambda self, version, step: 0)


def no_admission_limit(patch: pytest.MonkeyPatch) -> None:
    """Without the limit work is thrown away as stale; staleness itself is still refused."""
    no_staleness_check(patch)
    patch.setattr(leases, "admissible", lambda state, loaded: 8)


def no_commit_vote(patch: pytest.MonkeyPatch) -> None:
    """The first vote commits."""
    guarded = cmd.vote

    @command
    def vote(d: Any, now: float, *ballot: Any) -> Any:
        result = guarded(*ballot).execute(d, now)
        if result.outcome != "pending":
            return result
        step, version = d.state.steps.open.step, Version(d.state.versions.version + 1)
        d.emit(
            ev.StepCommitted(step, version, step_metrics(d.state, d.state.steps.open, now, {}), now)
        )
        d.settle_fleet(now)
        return steps.VoteResult(VoteOutcome.COMMITTED, d.state.versions.version)

    patch.setattr(cmd, "vote", vote)


def no_digest_comparison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps, "diverged", lambda mesh, step: ())


def no_lease_expiry(patch: pytest.MonkeyPatch) -> None:
    """Silent workers live for ever."""
    patch.setattr(Liveness, "_verdict", lambda self, state, key, pulse, now, lost: None)


def every_death_charged_to_all_that_were_held(patch: pytest.MonkeyPatch) -> None:
    """Whoever happened to be on the same worker as a poisoned task is quarantined with it."""

    def release(*arguments: Any, counts: bool, suspected: bool = False, **named: Any) -> None:
        leases.release(*arguments, counts=counts or suspected, suspected=suspected, **named)

    patch.setattr(membership, "release", release)


def no_spare_is_put_to_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "settle_spares", lambda d: None)
    patch.setattr(invariants, "missing_at_work", lambda state: 0)


def replies_before_they_are_durable(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: GroupCommit) -> None: ...

    patch.setattr(GroupCommit, "durable", at_once)


def no_seat_is_needed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fleet, "seated", lambda fleet, worker: True)


def no_seat_is_freed_by_a_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Seats, "leave", lambda seats, name, holder, others, t: None)


def any_report_returns_a_seat(patch: pytest.MonkeyPatch) -> None:
    @of_worker
    def report_seat(
        d: Any, now: float, worker: Worker, grant: int, parked: bool, seen_term: int
    ) -> None:
        seat = d.state.fleet.seats.by_name.get(worker.seat)
        if seat is not None and seat.holder is not None and parked:
            d.emit(ev.SeatReturned(seat.name, *worker.who, grant, now))
            d.settle_fleet(now)

    patch.setattr(cmd, "report_seat", report_seat)


OF_SEATS = (no_seat_is_needed, no_seat_is_freed_by_a_death, any_report_returns_a_seat)
MUTANTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    no_owner_check,
    no_incarnation_fence,
    no_staleness_check,
    no_admission_limit,
    no_commit_vote,
    no_digest_comparison,
    no_lease_expiry,
    every_death_charged_to_all_that_were_held,
    no_spare_is_put_to_work,
    replies_before_they_are_durable,
    *OF_SEATS,
)


KNOWN = {
    no_owner_check: 3,
    no_incarnation_fence: 3,
    no_staleness_check: 4,
    no_lease_expiry: 9,
    no_digest_comparison: 54,
    every_death_charged_to_all_that_were_held: 55,
    replies_before_they_are_durable: 156,
}
"""Seeds that fail without guards which few schedules need."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_schedules_fail_without(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    turns = float(mutant in OF_SEATS)
    assert first_failure(KNOWN.get(mutant, SEEDS[0]), turns=turns) is not None


@pytest.mark.timeout(0)
def test_schedules_fail_without_the_fence_on_appends() -> None:
    assert first_failure(fenced=False) is not None
