"""Events of tasks: leases, groups, drops, evaluation rounds."""

from bisect import insort
from collections.abc import Mapping
from dataclasses import field

from controller.ledger.enums import ROUTINE_DROPS, GroupFault, Kind, VerdictCode
from controller.ledger.events.event import LEASES, Event, Topic, event, reason_in_words
from controller.ledger.specs import HELD_OUT, EvalSet, GroupMeta, LeasedTask, SetResult
from controller.ledger.state.evals import EvalRound
from controller.ledger.state.state import State
from controller.ledger.state.tasks import Task, TaskState
from paceline.errors import plural
from paceline.evaluation import RowScore
from paceline.ids import Step, TaskId, Version
from paceline.observe.held_out import left_out_in_words
from paceline.observe.vocabulary import Severity


@event(directs=False, listed=False)
class TasksLeased(Event):
    """The reply to ``lease_seq``: a retry gets it again."""

    worker_id: str
    incarnation: int
    lease_seq: int
    leases: tuple[LeasedTask, ...]
    loaded_version: Version = Version(0)  # That the worker's engine serves

    def apply(self, s: State) -> None:
        worker = s.fleet.workers[self.worker_id]
        worker.lease_seq, worker.lease_reply = self.lease_seq, self.leases
        for lease in self.leases:
            worker.held[lease.task_id] = None
            task = s.tasks.lease(lease, self.worker_id)
            if task.kind is Kind.EVAL:
                round_ = s.evals.rounds[task.eval_step]
                round_.version = self.loaded_version
                round_.pending.remove(task.ordinal)


@event(wakes=frozenset({Topic.ISOLATED}), directs=False, listed=False)
class GroupAccepted(Event):
    """The training group is ready; its payload is stored under (task_id, attempt)."""

    worker_id: str
    group: GroupMeta

    def apply(self, s: State) -> None:
        task = s.tasks.records[self.group.task_id]
        s.tasks.move(task, TaskState.READY)
        s.tasks.fruitless = 0
        task.group = self.group
        del s.fleet.workers[self.worker_id].held[task.task_id]


@event(wakes=LEASES, severity=Severity.WARNING)
class GroupLost(Event):
    """The payload of an accepted group is lost, or is not what was accepted: the group leaves its
    step, and its task goes back to the front of the queue, to be generated again."""

    task_id: TaskId
    attempt: int
    fault: GroupFault  # PAYLOAD_LOST or PAYLOAD_INVALID
    detail: str  # Who found it, and what
    worker_id: str
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, prompt included."""

    def apply(self, s: State) -> None:
        task = s.tasks.records[self.task_id]
        assert task.group is not None
        s.tasks.count_dropped(self.fault, task.group)
        s.steps.suspects.pop(self.task_id, None)
        s.steps.leave_out(self.task_id)
        s.tasks.move(task, TaskState.PENDING)
        task.group = None
        task.failures += (f"{self.worker_id}: {self.fault} {self.detail}",)
        # What the store may still have of it is not to be trained.
        s.garbage.append((self.task_id, self.attempt))

    def text(self) -> str:
        why = reason_in_words(self.fault, self.detail) + _sequences(self.lengths)
        return f"group of task {self.task_id} is generated again ({why})"


@event(wakes=LEASES, listed=False)
class TaskReleased(Event):
    task_id: TaskId
    attempt: int
    worker_id: str
    reason: str  # A ReleaseReason, or the worker's reason for a failed attempt
    counts: bool  # The attempt counts towards quarantine
    detail: str = ""
    suspected: bool = False  # The owner died with it, and it may have been the cause

    def apply(self, s: State) -> None:
        task = s.tasks.records[self.task_id]
        s.tasks.move(task, TaskState.PENDING)
        if self.counts:
            task.failures += (f"{self.worker_id}: {self.reason} {self.detail}".strip(),)
        if self.suspected:
            task.deaths += 1
            if task.suspect:
                s.tasks.suspects[task.task_id] = None
        s.fleet.workers[self.worker_id].held.pop(self.task_id, None)
        if task.kind is Kind.EVAL:
            insort(s.evals.rounds[task.eval_step].pending, task.ordinal)


@event(wakes=LEASES, severity=Severity.WARNING, listed=lambda e: e.reason not in ROUTINE_DROPS)
class TaskDropped(Event):
    """The task is finished without being trained, for good. Another task takes its place."""

    task_id: TaskId
    attempt: int
    reason: str  # A DropReason, a GroupFault, or the worker's own reason
    detail: str = ""
    verdict: VerdictCode = VerdictCode.DUPLICATE  # On a repeated submission of this attempt
    group: GroupMeta | None = None  # The group, if one had been generated

    def apply(self, s: State) -> None:
        task = s.tasks.records[self.task_id]
        if task.leased:
            del s.fleet.workers[task.owner].held[self.task_id]
        if task.kind is Kind.EVAL:
            round_ = s.evals.rounds[task.eval_step]
            round_.open -= 1
            if not task.leased:
                round_.pending.remove(task.ordinal)
        elif task.state is not TaskState.PENDING:
            s.garbage.append((self.task_id, self.attempt))
        if self.group is not None:
            s.tasks.count_dropped(self.reason, self.group)
        s.steps.suspects.pop(self.task_id, None)
        if task.state is TaskState.IN_STEP:
            s.steps.leave_out(self.task_id)
        s.tasks.drop(task, self.reason, self.detail, self.verdict)

    def text(self) -> str:
        lengths = self.group.whole_lengths if self.group and self.reason in set(GroupFault) else ()
        why = reason_in_words(self.reason, self.detail) + _sequences(lengths)
        return f"task {self.task_id} dropped ({why})"


def _sequences(lengths: tuple[int, ...]) -> str:
    """ "; sequences of 812, 640 and 17 tokens"; empty without lengths."""
    if not lengths:
        return ""
    *most, last = map(str, lengths)
    listed = f"{', '.join(most)} and {last}" if most else last
    return f"; sequences of {listed} tokens"


@event(wakes=LEASES | {Topic.PLAN})
class EvalScheduled(Event):
    step: Step
    version: Version
    rows: int
    sets: tuple[EvalSet, ...]

    def apply(self, s: State) -> None:
        s.evals.rounds[self.step] = round_ = EvalRound(self.step, self.rows, self.sets, open=1)
        if s.run.recorded:
            return  # one replica measures all rows at once: there is nothing to lease
        round_.pending, round_.open = list(range(self.rows)), self.rows
        for row in round_.pending:
            task = Task(TaskId(f"e{self.step}.{row}"), Kind.EVAL, row, TaskState.PENDING)
            task.eval_step = self.step
            s.tasks.records[task.task_id] = task

    def text(self) -> str:
        named = [each.name for each in self.sets if len(self.sets) > 1 or each.name != HELD_OUT]
        of = f" of {', '.join(named)}" if named else ""
        return f"evaluation after step {self.step} started over {plural(self.rows, 'prompt')}{of}"


@event(wakes=frozenset({Topic.ISOLATED}), directs=False, listed=False)
class EvalTaskDone(Event):
    task_id: TaskId
    attempt: int
    worker_id: str
    version: Version
    """Version of all tokens; MIXED if they are of several versions, or of one in doubt."""
    row: RowScore

    def apply(self, s: State) -> None:
        task = s.tasks.records[self.task_id]
        s.fleet.workers[self.worker_id].held.pop(self.task_id, None)
        s.evals.rounds[task.eval_step].score(task.ordinal, self.row, self.version)
        s.tasks.move(task, None)
        s.tasks.forget(task, VerdictCode.DUPLICATE)


@event()
class EvalRecorded(Event):
    step: Step
    version: Version
    reward_mean: float | None
    """Mean reward of the set that ranks evaluations. None if at most half of its rows were scored
    with one version: that is no reward of 0; or if the set was not due."""
    count: int
    """Rows of that set scored with ``version``, the version of most: the reward is their mean."""
    left_out: int = 0
    """Rows of that set that were scored with other versions, with several, or with one in doubt. Of
    recorded data: that could not be measured."""
    loss: float | None = None  # Held-out loss of recorded data, which has no reward
    measured: Mapping[str, float] = field(default_factory=dict)
    """Recorded data: means over the rows, the loss among them."""
    metric: str = ""  # SET/METRIC that ranks evaluations; empty: the loss does
    score: float | None = None  # Value of ``metric``
    sets: tuple[SetResult, ...] = ()

    @property
    def ranking(self) -> float | None:
        """Higher is better."""
        return self.score if self.loss is None else -self.loss

    def apply(self, s: State) -> None:
        s.evals.end(self.step, self.ranking)

    def text(self) -> str:
        shown = "; ".join(map(self._set_in_words, self.sets)) or "no prompt could be scored"
        if self.loss is not None:
            shown = f"loss {self.loss:.4f} over {plural(self.count, 'row')}"
            shown += left_out_in_words(0, self.left_out)
        return f"evaluation after step {self.step}: {shown}"

    def _set_in_words(self, result: SetResult) -> str:
        """ "math: pass@1 0.500, reward 0.480 over 30 prompts"; the only set has no name."""
        judging, _, metric = self.metric.partition("/")
        unnamed = len(self.sets) == 1 and self.metric == f"{HELD_OUT}/reward"
        name = "" if unnamed else f"{result.name}: "
        left_out = left_out_in_words(result.left_out, result.failed)
        if not result.metrics:
            few = f"too few prompts were scored with one version of the weights ({result.count})"
            told = f"no reward, {few}" if result.count else "no prompt could be scored"
            return f"{name}{told}{left_out}"
        shown = dict.fromkeys([metric, "reward"] if judging == result.name else ["reward"])
        values = ", ".join(f"{key} {result.metrics[key]:.3f}" for key in shown)
        return f"{name}{values} over {plural(result.count, 'prompt')}{left_out}"
