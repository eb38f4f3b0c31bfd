"""State of a run. It changes in the ``apply`` of the events alone; nothing here decides."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controller.ledger.codec import TRANSIENT
from controller.ledger.enums import PHASE_TRANSITIONS, Phase
from controller.ledger.specs import GroupMeta, RunSpec
from controller.ledger.state.evals import Evals
from controller.ledger.state.fleet import Fleet, Worker
from controller.ledger.state.settings import Settings
from controller.ledger.state.steps import StepBook
from controller.ledger.state.tasks import TaskBook
from controller.ledger.state.versions import Versions
from paceline.ids import Step, TaskId, Version

_REQUESTS_KEPT = 256


@dataclass(slots=True)
class State:
    run_spec: RunSpec | None = None
    phase: Phase = Phase.NONE
    paused: bool = False
    reason: str = ""  # Reason why the run was asked to stop, or failed
    started_t: float = 0.0
    ended_t: float = 0.0
    term: int = 0
    leader: str = ""
    terms: int = 0  # Leaders so far
    failovers: int = 0  # Leaders that took over a fleet at work
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
    settings: Settings = field(default_factory=Settings)
    staleness_changed: bool = False
    """max_staleness or token_age has changed: groups of before may be in steps."""
    garbage: list[tuple[TaskId, int]] = field(default_factory=list, metadata=TRANSIENT)
    """(task id, attempt) of payloads that are not needed any more. Not part of a snapshot."""

    @property
    def ended(self) -> bool:
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def over(self) -> bool:
        """Nothing is at work: the run has ended, or is stopped for now."""
        return self.ended or self.phase is Phase.SUSPENDED

    @property
    def next_step(self) -> Step:
        """The earliest step that a group which is not ready yet can be in."""
        return Step(self.versions.step + (2 if self.steps.open else 1))

    @property
    def run(self) -> RunSpec:
        assert self.run_spec is not None
        return self.run_spec

    def in_step(self, worker: Worker) -> bool:
        """True if the open step needs the worker's vote."""
        return self.steps.open is not None and self.fleet.in_mesh(worker)

    def meta(self, task_id: TaskId) -> GroupMeta:
        """The accepted group of this task."""
        group = self.tasks.records[task_id].group
        assert group is not None
        return group

    def costs(self, task_ids: Iterable[TaskId]) -> list[int]:
        """Tokens that a trainer computes for each of these groups."""
        groups = map(self.meta, task_ids)
        return [group.tokens + group.prefix_tokens for group in groups]

    def bound(self, bounds: Mapping[str, int]) -> None:
        """The limits that a leader's config has."""
        before, training = (each.get("training_seats", 0) for each in (self.bounds, bounds))
        self.bounds = dict(bounds)
        if training != before:  # otherwise the number that somebody asked for since stays
            self.fleet.seats.lend(training)

    def enter(self, phase: Phase) -> None:
        assert phase in PHASE_TRANSITIONS[self.phase], f"{self.phase} to {phase}"
        self.phase = phase

    def end(self, phase: Phase, t: float) -> None:
        self.enter(phase)
        self.ended_t = t
        self.evals.rounds.clear()
        self.cover(self.versions.checkpoint.step)

    def agree(self, version: Version, digest: str) -> None:
        """The replicas have voted on the weights of ``version``: a checkpoint of them covers its
        groups."""
        self.versions.agree(version, digest)
        self.cover(self.versions.agreed.step)

    def cover(self, step: Step) -> None:
        """No rollback can need the groups of steps up to ``step`` any more."""
        covered = self.steps.cover(step)
        self.garbage.extend(self.tasks.records[task_id].ref for task_id in covered)
        self.tasks.cover(covered)

    def remember(self, request_id: str, reply: str) -> None:
        self.requests[request_id] = reply
        if len(self.requests) > _REQUESTS_KEPT:
            del self.requests[next(iter(self.requests))]
