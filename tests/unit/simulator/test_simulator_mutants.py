"""The schedules can fail: with any one guard removed, some do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controller.fleet.liveness import Liveness
from controller.ledger import commands as cmd
from controller.ledger import events as ev
from controller.ledger import invariants
from controller.ledger.decisions import leases, membership, rejections, standby_workers, steps
from controller.ledger.decisions.decider import DECISIONS, Decider
from controller.ledger.specs import RunSpec
from controller.ledger.state.steps import StepBook, assign_shards
from controller.ledger.state.tasks import Task
from controller.ledger.state.versions import Versions
from controller.ledger.views import views
from controller.store.group_commit import GroupCommit
from testbed.simulator.faults import run_schedule

pytestmark = pytest.mark.heavy  # schedules until one fails

SEEDS = range(1000)


def first_failure(known: int = SEEDS[0], **options: Any) -> int | None:
    """The first seed that fails; ``known`` is tried before the others."""
    for seed in (known, *SEEDS):
        try:
            run_schedule(seed, **options)
        except Exception:
            return seed
    return None


def no_lease_idempotency(patch: pytest.MonkeyPatch) -> None:
    def lease(d: Any, c: cmd.LeaseTasks, now: float) -> Any:
        worker = d.caller(c.worker_id, c.incarnation)
        fresh = cmd.LeaseTasks(
            c.worker_id, c.incarnation, worker.lease_seq + 1, c.max_tasks, c.loaded_version
        )
        return leases.lease(d, fresh, now)

    patch.setitem(DECISIONS, cmd.LeaseTasks, lease)


def no_submission_idempotency(patch: pytest.MonkeyPatch) -> None:
    """A group of the newest attempt is taken whatever became of the task meanwhile."""
    patch.setattr(Task, "leased_as", lambda task, a, w: (task.attempt, task.owner) == (a, w))


def no_owner_check(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Task, "leased_as", lambda task, attempt, worker_id: task.leased)


def no_incarnation_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Decider, "caller", lambda d, w, i: d.state.fleet.workers[w])


def no_staleness_check(patch: pytest.MonkeyPatch) -> None:
    """Neither at acceptance nor when a step opens."""
    patch.setattr(Versions, "staleness", lambda self, version, step: 0)


def slow_groups_are_dropped(patch: pytest.MonkeyPatch) -> None:
    """Of every run, as of one that drops late groups; no invariant of the ledger says otherwise."""
    patch.setattr(RunSpec, "trains_late", False)


def a_step_takes_the_first_groups(patch: pytest.MonkeyPatch) -> None:
    """Those that were ready first, whenever they were leased."""

    def choose(d: Any, step: int, count: int) -> tuple[str, ...] | None:
        found = chosen(d, step, count)
        return found and tuple(d.state.tasks.ready)[: len(found)]

    chosen = steps._choose
    patch.setattr(steps, "_choose", choose)


def masked_tokens_are_counted(patch: pytest.MonkeyPatch) -> None:
    """The step's totals count tokens that no replica trains."""
    patch.setattr(views, "trained_tokens", lambda state, group, step: group.tokens)


def no_admission_limit(patch: pytest.MonkeyPatch) -> None:
    """Without the limit work is thrown away as stale; staleness itself is still refused."""
    no_staleness_check(patch)
    patch.setattr(leases, "admissible", lambda state, loaded: 8)


def no_commit_vote(patch: pytest.MonkeyPatch) -> None:
    """The first vote commits."""

    def vote(d: Any, c: cmd.CastVote, now: float) -> Any:
        result = steps.vote(d, c, now)
        if result.outcome != "pending":
            return result
        steps._commit(d, d.state.steps.open, now)
        return cmd.VoteResult("committed", d.state.versions.version)

    patch.setitem(DECISIONS, cmd.CastVote, vote)


def no_memory_of_commits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBook, "committed", lambda self, step, epoch: None)


def no_digest_comparison(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(steps, "diverged", lambda mesh, step: ())


def no_stickiness_of_shards(patch: pytest.MonkeyPatch) -> None:
    """A lost member's step is resharded from scratch."""
    patch.setattr(
        steps,
        "assign_shards",
        lambda costs, members, kept=None: assign_shards(costs, members[::-1]),
    )


def no_payloads_after_commit(patch: pytest.MonkeyPatch) -> None:
    committed = ev.StepCommitted.apply

    def forget(e: Any, s: Any) -> None:
        groups = s.steps.open.groups
        committed(e, s)
        s.garbage.extend((t, s.tasks.records[t].attempt) for t in groups)

    patch.setattr(ev.StepCommitted, "apply", forget)


def no_lease_expiry(patch: pytest.MonkeyPatch) -> None:
    """Silent workers live for ever."""
    patch.setattr(Liveness, "_verdict", lambda self, state, key, pulse, now: None)


def no_expiry_of_unnamed_leases(patch: pytest.MonkeyPatch) -> None:
    """A lease whose reply was lost belongs to its owner for ever."""
    patch.setitem(DECISIONS, cmd.ExpireLease, lambda d, c, now: None)


def every_death_charged_to_all_that_were_held(patch: pytest.MonkeyPatch) -> None:
    """Whoever happened to be on the same worker as a poisoned task is quarantined with it."""

    def release(*arguments: Any, counts: bool, suspected: bool = False, **named: Any) -> None:
        leases.release(*arguments, counts=counts or suspected, suspected=suspected, **named)

    patch.setattr(membership, "release", release)


def suspects_in_company(patch: pytest.MonkeyPatch) -> None:
    """A poisoned task is leased with others for ever, and never found out."""
    patch.setattr(Task, "suspect", property(lambda self: False))


def trainers_die_and_no_group_is_blamed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(membership, "blame", lambda d, worker: [])


def a_dead_trainers_whole_shard_leaves(patch: pytest.MonkeyPatch) -> None:
    """Whoever happened to be in the shard of a trainer that died leaves the step."""

    def blame(d: Any, worker: Any) -> list[Any]:
        step = d.state.steps.open
        shard = step.shard(worker.worker_id) if step is not None else ()
        return [d.state.tasks.records[task_id] for task_id in shard]

    patch.setattr(membership, "blame", blame)


def a_rejection_is_not_heard(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(DECISIONS, cmd.RejectGroups, lambda d, c, now: 0)


def a_step_opens_anew_in_the_same_epoch(patch: pytest.MonkeyPatch) -> None:
    """Votes for the composition that a group has left count for the next one."""

    def reject(d: Any, c: cmd.RejectGroups, now: float) -> int:
        step = d.state.steps.open
        shard = step.shard(c.worker_id) if step is not None and step.step == c.step else ()
        groups = [d.state.tasks.records[t] for t, _ in c.groups if t in shard]
        if groups:
            rejections.drop_from_step(d, groups, c.fault, c.detail)
            steps.settle_step(d, now)
        return len(groups)

    patch.setitem(DECISIONS, cmd.RejectGroups, reject)


def no_spare_is_put_to_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(standby_workers, "settle_spares", lambda d: None)
    patch.setattr(invariants, "missing_at_work", lambda state: 0)


def replies_before_they_are_durable(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: GroupCommit) -> None: ...

    patch.setattr(GroupCommit, "durable", at_once)


MUTANTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    no_lease_idempotency,
    no_submission_idempotency,
    no_owner_check,
    no_incarnation_fence,
    no_staleness_check,
    slow_groups_are_dropped,
    a_step_takes_the_first_groups,
    masked_tokens_are_counted,
    no_admission_limit,
    no_commit_vote,
    no_memory_of_commits,
    no_digest_comparison,
    no_stickiness_of_shards,
    no_payloads_after_commit,
    no_lease_expiry,
    no_expiry_of_unnamed_leases,
    every_death_charged_to_all_that_were_held,
    suspects_in_company,
    trainers_die_and_no_group_is_blamed,
    a_dead_trainers_whole_shard_leaves,
    a_rejection_is_not_heard,
    a_step_opens_anew_in_the_same_epoch,
    no_spare_is_put_to_work,
    replies_before_they_are_durable,
)


KNOWN = {
    no_incarnation_fence: 14,
    suspects_in_company: 25,
    every_death_charged_to_all_that_were_held: 55,
    no_payloads_after_commit: 117,
    replies_before_they_are_durable: 139,
}
"""Seeds that fail without guards which few schedules need."""


@pytest.mark.timeout(0)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_schedules_fail_without(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert first_failure(KNOWN.get(mutant, SEEDS[0])) is not None


@pytest.mark.timeout(0)
def test_schedules_fail_without_the_fence_on_appends() -> None:
    assert first_failure(fenced=False) is not None
