"""State of a run, and the effect of each event on it.

State changes only here and in the ``apply_*`` methods of tasks, steps, fleet, versions and evals; nothing
here decides. ``dump`` and ``load`` are exact: a loaded state behaves, and dumps, like the original.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from controller.ledger import events as ev
from controller.ledger.codec import TRANSIENT, decoder, encoder
from controller.ledger.enums import Kind, VerdictCode
from controller.ledger.evals import Evals
from controller.ledger.facts import RunSpec
from controller.ledger.fleet import Fleet
from controller.ledger.steps import StepBook
from controller.ledger.tasks import Task, TaskBook, TaskState
from controller.ledger.versions import Versions
from paceline.ids import Step, TaskId

_REQUESTS_KEPT = 256


class Phase(StrEnum):
    NONE = "none"  # no run yet
    OPEN = "open"  # tasks are leased and steps open
    STOPPING = "stopping"  # asked to end: no new step, no new lease
    FINISHED = "finished"  # ended as planned or as asked
    FAILED = "failed"  # ended because it could not go on


PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.NONE: frozenset({Phase.OPEN}),
    Phase.OPEN: frozenset({Phase.STOPPING, Phase.FINISHED, Phase.FAILED}),
    Phase.STOPPING: frozenset({Phase.STOPPING, Phase.FINISHED, Phase.FAILED}),
    Phase.FINISHED: frozenset(),
    Phase.FAILED: frozenset(),
}


@dataclass(slots=True)
class State:
    facts: RunSpec | None = None
    phase: Phase = Phase.NONE
    paused: bool = False
    reason: str = ""
    """Why the run was asked to stop, or failed."""
    started_t: float = 0.0
    ended_t: float = 0.0
    term: int = 0
    leader: str = ""
    terms: int = 0
    """Leaders so far."""
    failovers: int = 0
    """Leaders that took over a fleet at work."""
    desired: dict[str, int] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    """Limits of the desired counts; see RunSpec.bounds."""
    requests: dict[str, str] = field(default_factory=dict)
    """Replies to the last admin requests, by request id."""
    tasks: TaskBook = field(default_factory=TaskBook)
    steps: StepBook = field(default_factory=StepBook)
    fleet: Fleet = field(default_factory=Fleet)
    versions: Versions = field(default_factory=Versions)
    evals: Evals = field(default_factory=Evals)
    garbage: list[tuple[TaskId, int]] = field(default_factory=list, metadata=TRANSIENT)
    """(task id, attempt) of payloads that are not needed any more. Not part of a snapshot."""

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def next_step(self) -> Step:
        """The earliest step that a group which is not ready yet can be in."""
        return Step(self.versions.step + (2 if self.steps.open else 1))

    @property
    def run(self) -> RunSpec:
        assert self.facts is not None
        return self.facts

    def enter(self, phase: Phase) -> None:
        assert phase in PHASE_TRANSITIONS[self.phase], f"{self.phase} to {phase}"
        self.phase = phase

    def remember(self, request_id: str, reply: str) -> None:
        self.requests[request_id] = reply
        if len(self.requests) > _REQUESTS_KEPT:
            del self.requests[next(iter(self.requests))]


_ENCODE, _DECODE = encoder(State), decoder(State)


def dump(state: State) -> dict[str, Any]:
    """The state as JSON-able values. ``load`` is its exact inverse."""
    assert _ENCODE is not None
    dumped: dict[str, Any] = _ENCODE(state)
    return dumped


def load(data: dict[str, Any]) -> State:
    assert _DECODE is not None
    state: State = _DECODE(data)
    return state


def apply(state: State, event: ev.Event) -> None:
    """Makes ``event`` true of ``state``. Deterministic; never fails on an event that was decided."""
    _APPLY[type(event)](state, event)


def _started(s: State, e: ev.RunStarted) -> None:
    s.facts = e.facts
    s.desired = dict(e.facts.desired)
    s.bounds = dict(e.facts.bounds)
    s.enter(Phase.OPEN)
    s.started_t = s.steps.last_commit_t = e.t


def _term(s: State, e: ev.TermBegun) -> None:
    s.term = e.term
    s.leader = e.controller_id
    s.terms += 1
    s.failovers += e.failover


def _leased(s: State, e: ev.TasksLeased) -> None:
    s.fleet.apply_leased(e)
    for lease in e.leases:
        s.tasks.apply_leased(lease, e.worker_id)
        task = s.tasks.records[lease.task_id]
        if task.kind is Kind.EVAL:
            s.evals.lease(task.eval_step, task.ordinal)


def _accepted(s: State, e: ev.GroupAccepted) -> None:
    s.tasks.apply_accepted(e)
    del s.fleet.workers[e.worker_id].held[e.group.task_id]


def _released(s: State, e: ev.TaskReleased) -> None:
    s.tasks.apply_released(e)
    s.fleet.workers[e.worker_id].held.pop(e.task_id, None)
    task = s.tasks.records[e.task_id]
    if task.kind is Kind.EVAL:
        s.evals.release(task.eval_step, task.ordinal)


def _dropped(s: State, e: ev.TaskDropped) -> None:
    task = s.tasks.records[e.task_id]
    if task.leased:
        del s.fleet.workers[task.owner].held[e.task_id]
    if task.kind is Kind.EVAL:
        s.evals.drop(task.eval_step, task.ordinal)
    elif task.state is not TaskState.PENDING:
        s.garbage.append((e.task_id, e.attempt))
    s.tasks.apply_dropped(e)


def _eval_scheduled(s: State, e: ev.EvalScheduled) -> None:
    s.evals.apply_scheduled(e)
    for row in range(e.rows):
        task_id = TaskId(f"e{e.step}.{row}")
        s.tasks.records[task_id] = Task(
            task_id, Kind.EVAL, row, state=TaskState.PENDING, eval_step=e.step
        )


def _eval_done(s: State, e: ev.EvalTaskDone) -> None:
    task = s.tasks.records[e.task_id]
    s.fleet.workers[e.worker_id].held.pop(e.task_id, None)
    s.evals.score(task.eval_step, e.reward_mean)
    s.tasks.forget(task, VerdictCode.DUPLICATE)


def _rolled_back(s: State, e: ev.RolledBack) -> None:
    s.versions.apply_rollback(e)
    s.tasks.untrain(s.steps.apply_rollback(e.step))


def _opened(s: State, e: ev.StepOpened) -> None:
    if not e.replay:
        s.tasks.take_into_step(e.groups)
    s.steps.apply_opened(e)


def _committed(s: State, e: ev.StepCommitted) -> None:
    assert s.steps.open is not None and s.fleet.mesh is not None
    s.tasks.train(s.steps.open.groups)
    s.steps.apply_committed(e, ((m.worker_id, m.incarnation) for m in s.fleet.mesh.members))
    s.versions.commit(e.version)
    s.fleet.apply_committed(e.version)


def _aborted(s: State, e: ev.StepAborted) -> None:
    step = s.steps.open
    if step is None or step.step != e.step:  # a lost step that will not be trained again
        s.tasks.back_to_ready(s.steps.replay.pop(e.step))
        return
    s.steps.open = None
    if step.replay:
        s.steps.replay[step.step] = step.groups
    else:
        s.tasks.back_to_ready(step.groups)


def _checkpointed(s: State, e: ev.CheckpointRecorded) -> None:
    s.versions.apply_checkpoint(e)
    covered = s.steps.apply_checkpoint(e.step)
    s.garbage.extend((task_id, s.tasks.records[task_id].attempt) for task_id in covered)
    s.tasks.cover(covered)


def _scaled(s: State, e: ev.Scaled) -> None:
    s.desired.update(e.desired)
    s.remember(e.request_id, f"desired counts are now {desired_in_words(s)}")


def desired_in_words(s: State) -> str:
    """ "policy=1, rollout=3"."""
    return ", ".join(f"{role}={count}" for role, count in sorted(s.desired.items()))


def _bounds_set(s: State, e: ev.BoundsSet) -> None:
    s.bounds = dict(e.bounds)


def _drained(s: State, e: ev.Drained) -> None:
    s.fleet.apply_drained(e)
    s.desired.update(e.desired)
    reply = f"{e.worker_id} finishes what it holds and leaves"
    changed = f"; desired counts are now {desired_in_words(s)}" if e.desired else ""
    s.remember(e.request_id, reply + changed)


def _paused(s: State, e: ev.Paused) -> None:
    s.paused = e.paused
    s.remember(e.request_id, "paused" if e.paused else "resumed")


def _checkpoint_requested(s: State, e: ev.CheckpointRequested) -> None:
    s.versions.requested = e.step
    s.remember(e.request_id, f"a checkpoint will be written after step {e.step}")


def _stop_requested(s: State, e: ev.StopRequested) -> None:
    s.enter(Phase.STOPPING)
    s.reason = e.reason
    s.remember(e.request_id, "the run ends after the open step")


def _finished(s: State, e: ev.RunFinished) -> None:
    s.enter(Phase.FINISHED)
    s.ended_t = e.t
    s.evals.rounds.clear()


def _failed(s: State, e: ev.RunFailed) -> None:
    s.enter(Phase.FAILED)
    s.reason = e.reason
    s.ended_t = e.t
    s.evals.rounds.clear()
    s.remember(e.request_id, f"the run has failed: {e.reason}")


_APPLY: dict[type[Any], Callable[[State, Any], None]] = {
    ev.RunStarted: _started,
    ev.TermBegun: _term,
    ev.WorkerRegistered: lambda s, e: s.fleet.apply_registered(e),
    ev.WorkerDied: lambda s, e: s.fleet.apply_died(e),
    ev.WorkerChanged: lambda s, e: s.fleet.apply_changed(e),
    ev.SpareSet: lambda s, e: s.fleet.apply_spare(e),
    ev.TasksLeased: _leased,
    ev.GroupAccepted: _accepted,
    ev.TaskReleased: _released,
    ev.TaskDropped: _dropped,
    ev.MeshBroken: lambda s, e: s.fleet.apply_mesh_broken(e),
    ev.MeshFormed: lambda s, e: s.fleet.apply_mesh_formed(e),
    ev.RolledBack: _rolled_back,
    ev.LinkAssigned: lambda s, e: s.fleet.apply_link(e),
    ev.StepOpened: _opened,
    ev.StepResharded: lambda s, e: s.steps.apply_resharded(e),
    ev.VoteCast: lambda s, e: s.steps.apply_vote(e),
    ev.StepCommitted: _committed,
    ev.StepAborted: _aborted,
    ev.CheckpointRecorded: _checkpointed,
    ev.EvalScheduled: _eval_scheduled,
    ev.EvalTaskDone: _eval_done,
    ev.EvalRecorded: lambda s, e: s.evals.apply_recorded(e),
    ev.Scaled: _scaled,
    ev.BoundsSet: _bounds_set,
    ev.Drained: _drained,
    ev.Paused: _paused,
    ev.CheckpointRequested: _checkpoint_requested,
    ev.StopRequested: _stop_requested,
    ev.RunFinished: _finished,
    ev.RunFailed: _failed,
}
