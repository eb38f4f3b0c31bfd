"""Events of the run as a whole: its start and end, its leaders, requests of people."""

import json
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from controller.ledger.enums import Phase, SuspendStage
from controller.ledger.events.event import LEASES, Event, Topic, counts_in_words, event
from controller.ledger.specs import LiveSpec, RunSpec, values
from controller.ledger.state.state import State
from paceline.ids import Step
from paceline.observe.vocabulary import Severity

_ALL = frozenset(Topic)
STALENESS = ("max_staleness", "late_groups", "max_token_age")


@event(wakes=LEASES, words="run started")
class RunStarted(Event):
    spec: RunSpec
    t: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that may change, by dotted name; see Settings."""

    def apply(self, s: State) -> None:
        s.run_spec = self.spec
        s.settings.values = dict(self.settings)
        s.settings.configured = dict(self.settings)
        s.desired = dict(self.spec.desired)
        s.bound(self.spec.bounds)
        s.enter(Phase.OPEN)
        s.started_t = s.steps.last_commit_t = self.t


@event(words="{0.controller_id} leads (term {0.term})", warns=lambda e: e.failover)
class TermBegun(Event):
    """``controller_id`` leads from here on; nothing of an earlier term follows."""

    term: int
    controller_id: str
    t: float
    failover: bool = False
    """It took over a fleet at work: not the first leader, nor that of a run that is resumed."""

    def apply(self, s: State) -> None:
        s.term = self.term
        s.leader = self.controller_id
        if s.terms:
            s.fleet.doubt_grants()
        s.terms += 1
        s.failovers += self.failover


@event()
class Scaled(Event):
    request_id: str
    desired: Mapping[str, int]

    def apply(self, s: State) -> None:
        s.desired.update(self.desired)
        s.remember(self.request_id, f"desired counts are now {counts_in_words(s.desired)}")

    def text(self) -> str:
        return f"desired counts set to {counts_in_words(self.desired)}"


@event()
class BoundsSet(Event):
    """Limits of the desired counts from here on; see RunSpec.bounds."""

    bounds: Mapping[str, int]

    def apply(self, s: State) -> None:
        s.bound(self.bounds)

    def text(self) -> str:
        return f"limits of the desired counts set to {counts_in_words(self.bounds) or 'none'}"


@event(wakes=_ALL, listed=lambda e: bool(e.changes))
class SettingsChanged(Event):
    """From ``step`` on other settings are in force, or a leader brought an edited config file."""

    request_id: str  # Empty: a leader's config file was edited
    changes: Mapping[str, tuple[Any, Any]]  # Old and new value, by dotted name
    configured: Mapping[str, Any]
    """Edited values of the leader's file. They are in force, or were already."""
    spec: LiveSpec
    step: Step
    """The first step that uses them. A step that is open, or trained again, keeps its own."""
    t: float

    def apply(self, s: State) -> None:
        before, s.run_spec = s.run, replace(s.run, **values(LiveSpec, self.spec))
        s.staleness_changed |= any(
            getattr(before, name) != getattr(self.spec, name) for name in STALENESS
        )
        s.settings.change(self.changes, self.step)
        s.settings.configured.update(self.configured)
        for name, value in self.configured.items():
            s.settings.values.setdefault(name, value)
        if self.request_id:
            s.remember(self.request_id, self.text())

    def text(self) -> str:
        shown = ", ".join(
            f"{name} {json.dumps(old)} -> {json.dumps(new)}"
            for name, (old, new) in self.changes.items()
        )
        return f"settings changed from step {self.step}: {shown or 'none'}"


@event(wakes=_ALL, words="run extended to {0.steps} steps")
class RunExtended(Event):
    """A finished run goes on: it was given more steps."""

    steps: int
    t: float

    def apply(self, s: State) -> None:
        s.enter(Phase.OPEN)
        s.ended_t = 0.0
        s.steps.last_commit_t = self.t
        s.tasks.resume_unfinished()


@event(wakes=LEASES)
class Paused(Event):
    request_id: str
    paused: bool

    def apply(self, s: State) -> None:
        word, unchanged = ("paused", "paused already") if self.paused else ("resumed", "not paused")
        s.remember(self.request_id, word if s.paused != self.paused else f"the run is {unchanged}")
        s.paused = self.paused

    def text(self) -> str:
        return "run paused" if self.paused else "run resumed"


@event(words="checkpoint of step {0.step} requested")
class CheckpointRequested(Event):
    """A checkpoint of ``step``, the next one that the replicas can still write, was requested."""

    request_id: str
    step: Step

    def apply(self, s: State) -> None:
        s.versions.requested = self.step
        s.remember(self.request_id, f"a checkpoint will be written after step {self.step}")


_SUSPEND_REPLIES = {
    SuspendStage.FINISH_STEP: "the run stops for now, after the open step and a checkpoint",
    SuspendStage.LEAVE_STEP: "the run stops for now, after a checkpoint",
    SuspendStage.AT_ONCE: "the run stops for now",
}


@event(wakes=_ALL, listed=lambda e: e.stage is SuspendStage.FINISH_STEP)
class SuspendRequested(Event):
    """The run is to stop for now, or a stop under way is to go further; see SuspendStage."""

    request_id: str
    reason: str
    stage: SuspendStage

    def apply(self, s: State) -> None:
        if s.phase is Phase.OPEN:
            s.enter(Phase.SUSPENDING)
        s.remember(self.request_id, _SUSPEND_REPLIES[self.stage])

    def text(self) -> str:
        return "stop for now requested" + (f": {self.reason}" if self.reason else "")


@event(wakes=_ALL)
class RunSuspended(Event):
    """The workers leave. A fleet that is started later continues the run."""

    step: Step
    checkpoint_step: Step

    def apply(self, s: State) -> None:
        s.enter(Phase.SUSPENDED)
        for worker in s.fleet.workers.values():
            # Those that register later belong to the next fleet and wait for the run to go on.
            worker.drain = worker.drain or worker.alive

    def text(self) -> str:
        where = f"run stopped for now after step {self.step}"
        if self.checkpoint_step == self.step:
            return f"{where}; a checkpoint covers it"
        return f"{where}; the newest checkpoint is of step {self.checkpoint_step}"


@event(wakes=_ALL, words="run goes on")
class RunContinued(Event):
    request_id: str

    def apply(self, s: State) -> None:
        s.enter(Phase.OPEN)
        s.remember(self.request_id, "the run goes on")


@event(wakes=_ALL)
class StopRequested(Event):
    request_id: str
    reason: str

    def apply(self, s: State) -> None:
        s.enter(Phase.STOPPING)
        s.reason = self.reason
        s.remember(self.request_id, "the run ends after the open step")

    def text(self) -> str:
        return f"stop requested: {self.reason}" if self.reason else "stop requested"


@event(wakes=_ALL, words="run finished ({0.reason})")
class RunFinished(Event):
    reason: str  # completed, or why it was stopped early
    t: float

    def apply(self, s: State) -> None:
        s.end(Phase.FINISHED, self.t)


@event(wakes=_ALL, severity=Severity.ERROR, words="run failed: {0.reason}")
class RunFailed(Event):
    request_id: str
    reason: str
    t: float

    def apply(self, s: State) -> None:
        s.end(Phase.FAILED, self.t)
        s.reason = self.reason
        s.remember(self.request_id, f"the run has failed: {self.reason}")
