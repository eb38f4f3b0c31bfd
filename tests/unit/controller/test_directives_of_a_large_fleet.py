"""Directives of a large fleet: what is built again after an event, by count. And that nothing is
forgotten."""

from collections.abc import Callable
from typing import Any

import pytest

from controller.fleet.sessions import ServerSession, Sessions
from controller.ledger import Ledger
from controller.ledger import decisions as cmd
from controller.ledger.enums import Role
from controller.ledger.state.fleet import Fleet
from paceline.v1 import common_pb2, worker_pb2
from testbed.simulator.faults import run_schedule
from tests.fixtures.ledgers import Driven, group


class CountedSessions(Sessions):
    """Knows whose directive was built."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(1, ledger)
        self.built: list[str] = []

    def _build(self, session: ServerSession) -> worker_pb2.Directive:
        self.built.append(session.worker_id)
        return super()._build(session)


class Desk:
    """A run with sessions of all its workers, and the names of those whose directive was built."""

    def __init__(self, rollouts: int, policies: int = 2) -> None:
        self.run = Driven(checked=False, max_staleness=8)
        self.sessions = CountedSessions(self.run.ledger)
        self.built = self.sessions.built
        self.policies = [f"p{n}" for n in range(policies)]
        self.rollouts = [f"r{n}" for n in range(rollouts)]
        self.run.policy(*self.policies)
        self.run.rollout(*self.rollouts)
        for worker_id in (*self.policies, *self.rollouts):
            caller = common_pb2.Caller(worker_id=worker_id, incarnation=self.run.current[worker_id])
            self.sessions.open(worker_pb2.Report(caller=caller))
        self.collect()

    def collect(self) -> list[str]:
        """Whose directive is built."""
        self.built.clear()
        self.sessions.collect()
        return self.built


def lease_and_expire(desk: Desk) -> None:
    (lease,) = desk.run.lease("r7", 1).leases
    desk.collect()
    desk.run.do(cmd.expire(lease.task_id, lease.attempt))


@pytest.mark.parametrize(
    ("happens", "concerned"),
    [
        (lambda desk: None, []),
        (lambda desk: desk.run.register("r50"), ["p0"]),  # itself, and its publisher
        (lambda desk: desk.run.do(cmd.drain("d", "r7", replace=True)), ["r7"]),
        (lease_and_expire, ["r7"]),
    ],
    ids=["nothing", "a worker joins", "a drain", "a lease expires"],
)
def test_a_directive_is_built_for_those_whom_it_concerns(
    happens: Callable[[Desk], None], concerned: list[str]
) -> None:
    desk = Desk(50)
    happens(desk)
    assert desk.collect() == concerned


def test_a_report_builds_a_directive_only_if_a_lease_it_names_is_gone() -> None:
    desk = Desk(2)
    session = desk.sessions.of("r0", desk.run.current["r0"])
    assert session is not None
    (lease,) = desk.run.lease("r0", 1).leases
    session.report.held_leases.add(task_id=lease.task_id, attempt=lease.attempt)
    desk.built.clear()
    assert desk.sessions.refresh(session) is None and desk.built == []
    desk.run.do(cmd.expire(lease.task_id, lease.attempt))
    directive = desk.sessions.refresh(session)
    assert directive is not None and [t.task_id for t in directive.cancelled] == [lease.task_id]
    # As long as the worker names it, and once after that.
    del session.report.held_leases[:]
    directive = desk.sessions.refresh(session)
    assert directive is not None and not directive.cancelled
    desk.built.clear()
    assert desk.sessions.refresh(session) is None and desk.built == []


def test_a_worker_that_leaves_hears_with_its_report_that_it_holds_nothing_any_more() -> None:
    """Nothing else may happen in a run whose last rollout worker is to be replaced."""
    desk = Desk(1)
    (lease,) = desk.run.lease("r0", 1).leases
    desk.run.do(cmd.drain("d", "r0", replace=True))
    desk.collect()
    desk.run.submit("r0", lease)
    session = desk.sessions.of("r0", desk.run.current["r0"])
    assert session is not None
    directive = desk.sessions.refresh(session)
    assert directive is not None and directive.lifecycle == worker_pb2.LIFECYCLE_STOPPED


def test_a_commit_concerns_everyone_once() -> None:
    desk = Desk(50)
    for lease in desk.run.lease("r0", 4).leases:
        desk.run.do(cmd.accept("r0", desk.run.current["r0"], group(lease)))
    desk.collect()
    step, mesh = desk.run.state.steps.open, desk.run.state.fleet.mesh
    for worker_id in desk.policies:
        who = worker_id, desk.run.current[worker_id]
        desk.run.do(cmd.vote(*who, step.step, mesh.epoch, "d", {}))
    assert sorted(desk.collect()) == sorted([*desk.policies, *desk.rollouts])
    assert desk.collect() == []


@pytest.mark.parametrize("rollouts", [10, 200])
def test_a_report_or_an_empty_lease_goes_through_no_worker(
    rollouts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many looks at the living workers for 200 as for 10: none."""
    desk = Desk(rollouts)
    looks: list[str] = []
    monkeypatch.setattr(Fleet, "living", lambda *_: looks.append("living") or [])
    monkeypatch.setattr(Fleet, "members", lambda *_: looks.append("members") or [])
    desk.run.state.versions.version += 1
    desk.run.observe("r3", loaded=desk.run.state.versions.version)
    assert desk.run.names() == ["WorkerChanged"]
    seq = desk.run.seqs["r4"] = 1
    reply = desk.run.do(cmd.lease("r4", desk.run.current["r4"], seq, 1, -1))
    assert reply.empty_reason == "weights" and looks == []


def test_a_change_of_a_policy_goes_through_the_links_of_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(50)
    roles: list[Role] = []
    living = Fleet.living
    monkeypatch.setattr(Fleet, "living", lambda f, role: roles.append(role) or living(f, role))
    desk.run.do(cmd.form_mesh())
    desk.run.ledger.settle_fleet(desk.run.now)
    assert roles.count(Role.ROLLOUT) == 1, "only to count the spares"


@pytest.mark.parametrize("seed", range(10))
def test_equal_grounds_mean_an_equal_directive(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random faults: what is not built again would come out as it was."""
    collect, looked = Sessions.collect, [0]

    def checked(sessions: Sessions) -> Any:
        grounds_of = sessions._grounds()
        for session in sessions._open.values():
            if grounds_of(session) == session.grounds:
                again = sessions._build(session).SerializeToString(deterministic=True)
                assert again == session.content, session.key
                looked[0] += 1
        return collect(sessions)

    monkeypatch.setattr(Sessions, "collect", checked)
    run_schedule(1_000_000 + seed)
    assert looked[0] > 0
