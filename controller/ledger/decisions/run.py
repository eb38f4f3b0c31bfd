"""Decisions about the run as a whole: start, leaders, requests of people, settings, end.

A change of settings is in force from the first step that was never opened. A step that is open, or
opens again, keeps the values and the groups of its plan, so all replicas and all attempts use the
same ones."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any

from controller.ledger import events as ev
from controller.ledger.decisions.commands import CommandRefused, Decider, by_request, command
from controller.ledger.decisions.mesh import leave_step, roll_back
from controller.ledger.decisions.rejections import MOST_REJECTIONS
from controller.ledger.decisions.seats import set_training
from controller.ledger.enums import DropReason, Phase, SuspendStage, VerdictCode
from controller.ledger.events.event import counts_in_words
from controller.ledger.limits import problem_of, within
from controller.ledger.specs import LiveSpec, RunSpec
from controller.ledger.state.state import State
from controller.ledger.state.tasks import TaskState
from paceline.errors import RefusalCode
from paceline.ids import Step
from paceline.observe.vocabulary import MeshEnd
from paceline.worker_pools import TRAINING

FRUITLESS_BATCHES = 3
FRUITLESS_TASKS = 20
"""A run fails after so many batches' worth of tasks, and so many tasks, were dropped in a row
because every attempt failed: a fault that hits every task is no task's fault."""
_FREE_TO_CHANGE = ("desired", "bounds", *(f.name for f in fields(LiveSpec)))
"""Fields of the spec that a later leader may bring with other values."""


@command
def start_run(
    d: Decider, now: float, spec: RunSpec, settings: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """First command of a run, and of every later leader of it. Refused if the run exists with
    another spec, apart from what may change. A finished run goes on if it is given more steps.
    ``settings``: changeable ones of the leader's config file, by dotted name. ``spec``: with the
    settings that are in force once these are taken over."""
    s = d.state
    if s.run_spec is None:
        d.emit(ev.RunStarted(spec, now, dict(settings)))
        d.settle_fleet(now)
        return
    before, after = asdict(s.run_spec), asdict(spec)
    differing = [k for k in before if k not in _FREE_TO_CHANGE and before[k] != after[k]]
    if differing:
        raise CommandRefused(
            RefusalCode.INVALID,
            f"run {s.run_spec.run_name!r} was started with other settings: "
            + ", ".join(f"{k} was {before[k]!r}, is {after[k]!r}" for k in differing),
        )
    take_over_config(d, now, spec.live, settings)
    if dict(spec.bounds) != s.bounds and not s.ended:
        d.emit(ev.BoundsSet(dict(spec.bounds)))
        allowed = within(s.bounds, s.desired)
        if allowed != s.desired:
            d.emit(ev.Scaled(f"bounds-after-term-{s.term}", allowed))
        d.settle_fleet(now)


@command
def begin_term(d: Decider, now: float, term: int, controller_id: str) -> None:
    s = d.state
    if (term, controller_id) == (s.term, s.leader):
        return
    if term <= s.term:
        raise CommandRefused(
            RefusalCode.FENCED, f"term {term} is over; {s.leader} leads term {s.term}"
        )
    failover = any(worker.alive for worker in s.fleet.workers.values())
    d.emit(ev.TermBegun(term, controller_id, now, failover))


@by_request
def change_settings(
    d: Decider, now: float, request_id: str, settings: Mapping[str, Any], spec: LiveSpec
) -> None:
    """``settings``: to change, by dotted name; the shell has validated them with the others.
    ``spec``: the fields of the run's spec that follow from them."""
    s = d.state
    check_steps(s, spec)
    changes = s.settings.differing(settings)
    if not changes:
        raise CommandRefused(RefusalCode.INVALID, "the run has these settings already")
    first = Step(_newest_step(s) + 1)
    d.emit(ev.SettingsChanged(request_id, changes, {}, spec, first, now))


def check_steps(s: State, spec: LiveSpec) -> None:
    """Raises CommandRefused if the run cannot go on with ``spec``."""
    newest = _newest_step(s)
    if spec.steps < newest:
        raise CommandRefused(
            RefusalCode.INVALID,
            f"train.steps = {spec.steps}: step {newest} is under way or trained already. To end "
            "the run now, use paceline stop",
        )


def _newest_step(s: State) -> Step:
    """The newest step that has its settings: trained, open, or to be opened again."""
    return Step(max([s.versions.step + (s.steps.open is not None), *s.steps.replay]))


def take_over_config(d: Decider, now: float, spec: LiveSpec, file: Mapping[str, Any]) -> None:
    """Puts in force what was edited in ``file``, of a new leader. Raises CommandRefused."""
    s = d.state
    if stays_ended(s, spec.steps):
        return
    extended = s.ended
    check_steps(s, spec)
    edited = s.settings.edited(file)
    # A setting that the run does not know yet is new in this release, and has not been edited.
    known = {name: value for name, value in edited.items() if name in s.settings.values}
    if edited:
        first, changes = Step(_newest_step(s) + 1), s.settings.differing(known)
        d.emit(ev.SettingsChanged("", changes, edited, spec, first, now))
    if extended:
        d.emit(ev.RunExtended(spec.steps, now))
    d.settle_fleet(now)


def stays_ended(s: State, steps: int) -> bool:
    """True if the run has ended and does not go on to ``steps``: its settings are final."""
    extended = s.phase is Phase.FINISHED and s.versions.step >= s.run.steps < steps
    return s.ended and not extended


def settle_end(d: Decider, now: float) -> None:
    """Ends the run once nothing is left to do, or to wait for."""
    s = d.state
    if s.over:
        return
    if s.tasks.fruitless >= max(FRUITLESS_BATCHES * s.run.groups_per_step, FRUITLESS_TASKS):
        why = f"{s.tasks.fruitless} tasks in a row were dropped without a group, the last one as"
        _fail(d, "no-group-accepted", f"{why} {s.tasks.last_failure}"[:2048], now)
        return
    if s.steps.rejections >= MOST_REJECTIONS:
        why = f"{s.steps.rejections} attempts in a row at step {s.versions.step + 1} were given up"
        why += f" because a group could not be trained, the last one as {s.steps.last_rejection}"
        _fail(d, "no-step-trained", why[:2048], now)
        return
    if 0 < s.run.max_nonfinite_steps <= s.steps.nonfinite:
        count, last = s.steps.nonfinite, s.versions.step
        why = (
            f"the gradients of {count} steps in a row were not finite, from step "
            f"{last - count + 1} on, and no weight has changed since. Look at grad_norm, "
            "rewards and log-prob gaps before it, lower train.optimizer.lr, and start again from "
            "an earlier checkpoint; train.max_nonfinite_steps is the limit"
        )
        _fail(d, "gradients-not-finite", why, now)
        return
    if s.steps.open is not None:
        return
    v = s.versions
    covered = v.checkpoint.step >= v.step
    if s.phase is Phase.STOPPING:
        if covered or not s.fleet.holders(v.version):
            _end_stopped(d, now)
    elif v.step >= s.run.steps and covered and not s.evals.rounds:
        _drop_leftovers(d)
        d.emit(ev.RunFinished("completed", now))
    elif s.phase is Phase.SUSPENDING and (covered or not s.fleet.holders(v.version)):
        _suspended(d)


def _end_stopped(d: Decider, now: float) -> None:
    s = d.state
    if s.versions.checkpoint.step < s.versions.step:
        # No replica has the state of the last steps, or none could save it in time: the run ends at
        # its checkpoint.
        roll_back(d)
    _drop_leftovers(d)
    d.emit(ev.RunFinished(s.reason, now))


def _drop_leftovers(d: Decider) -> None:
    s = d.state
    for step in sorted(s.steps.replay):
        d.emit(ev.StepAborted(step, DropReason.RUN_ENDED))
    for task in list(s.tasks.records.values()):
        if task.state is not TaskState.TRAINED:
            accepted = task.group is not None
            verdict = VerdictCode.DUPLICATE if accepted else VerdictCode.SUPERSEDED
            d.emit(ev.TaskDropped(*task.ref, DropReason.RUN_ENDED, verdict=verdict))


def _fail(d: Decider, request_id: str, reason: str, now: float) -> None:
    step = d.state.steps.open
    if step is not None:
        d.emit(ev.StepAborted(step.step, DropReason.RUN_ENDED))
    _drop_leftovers(d)
    d.emit(ev.RunFailed(request_id, reason, now))


@by_request
def scale(
    d: Decider,
    now: float,
    request_id: str,
    desired: Mapping[str, int],
    expected: Mapping[str, int] = MappingProxyType({}),
    why: str = "by request",
) -> None:
    """Refused if the desired counts of the roles in ``expected`` have become others."""
    if TRAINING in desired:
        set_training(d, request_id, desired, expected, why)
        return
    if problem := problem_of(d.state.bounds, desired, d.state.desired):
        raise CommandRefused(RefusalCode.INVALID, problem)
    if any(d.state.desired.get(role) != count for role, count in expected.items()):
        raise CommandRefused(
            RefusalCode.CHANGED,
            f"conflict: desired counts are now {counts_in_words(d.state.desired)}; "
            "re-read the status and retry",
        )
    d.emit(ev.Scaled(request_id, dict(desired)))


@by_request
def pause(d: Decider, now: float, request_id: str, paused: bool) -> None:
    d.emit(ev.Paused(request_id, paused))


@by_request
def request_checkpoint(d: Decider, now: float, request_id: str) -> None:
    """A checkpoint beside the regular ones, as soon as a step allows."""
    s = d.state
    # Replicas that are voting may get the directive only after their commit.
    late = s.steps.open is not None and bool(s.steps.open.votes)
    d.emit(ev.CheckpointRequested(request_id, Step(min(s.versions.step + 1 + late, s.run.steps))))


@by_request
def suspend(d: Decider, now: float, request_id: str, stage: SuspendStage, reason: str = "") -> None:
    """Stops for now: no new step and no new lease; once a checkpoint covers the last step, the
    workers leave. A run that is being ended for good ends in the same stages."""
    s = d.state
    d.emit(ev.SuspendRequested(request_id, reason, stage))
    if stage is not SuspendStage.FINISH_STEP:
        leave_step(d)
    d.settle_fleet(now)
    if stage is SuspendStage.AT_ONCE and s.phase is Phase.SUSPENDING:
        _suspended(d)
    elif stage is SuspendStage.AT_ONCE and s.phase is Phase.STOPPING:
        _end_stopped(d, now)


def _suspended(d: Decider) -> None:
    s = d.state
    if s.fleet.whole_mesh is not None:
        d.emit(ev.MeshBroken(s.fleet.whole_mesh.epoch, MeshEnd.MEMBERSHIP, "the run stops for now"))
    d.emit(ev.RunSuspended(s.versions.step, s.versions.checkpoint.step))


@by_request
def go_on(d: Decider, now: float, request_id: str) -> None:
    if d.state.phase not in (Phase.SUSPENDING, Phase.SUSPENDED):
        raise CommandRefused(RefusalCode.INVALID, "the run has not been stopped for now")
    d.emit(ev.RunContinued(request_id))


@by_request
def stop(d: Decider, now: float, request_id: str, reason: str, *, failed: bool = False) -> None:
    """Ends the run early, after the open step. ``failed``: because it cannot go on."""
    if failed:
        _fail(d, request_id, reason, now)
    else:
        d.emit(ev.StopRequested(request_id, reason))
