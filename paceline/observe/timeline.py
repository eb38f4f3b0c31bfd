"""Timeline of a run: what each process did and waited for, folded from its journal.

    journal ──► Timeline.take ──► slices, marks, flows ──► trace file (CLI), swim lanes (page)

A lane is a process, or the run itself; a row of it holds slices that never overlap. Only what is
open is kept, so a journal of any length takes the memory of its tasks in flight. Groups are handed
on with their outcome: the flow of a trained one is complete, and another's slice has the reason.
Listed events alone, without leases and votes, give the lives of processes, the steps and the marks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from paceline.observe.vocabulary import NO_FAULT, EventType, Severity

RUN, SEATS = "run", "seats"  # Lanes that are no process
ROLES = (RUN, "controller", "policy", "rollout", "scorer", SEATS)  # Of lanes, top to bottom
PROCESS, WORK, WEIGHTS = "process", "work", "weights"
STEPS, VERSIONS, LEADER = "steps", "newest version", "leader"
LEAST_S = 1e-6
MOST_VERSIONS = 1024  # Whose commits are remembered for receivers that lag
MOST_DOWN = 256  # Lanes of processes that are down and may come back
SET_BACK_S = 60.0
"""A clock that is behind by more was set back, and is followed; by less, it is another leader's. A
line of a file may have no time, 0."""

BUSY = frozenset({"compute", "reduce", "commit", "generate"})
"""Kinds of slices in which a process works. The others: wait, start, run, down, lead, step,
version, group, checkpoint, evaluate, seat, and open for a replica whose step is not over."""


class Slice(NamedTuple):
    """Times are Unix seconds. ``about``: details, JSON. ``owner``: who is waited for, if it is a
    wait and the journal tells."""

    lane: str
    row: str
    name: str
    kind: str
    start: float
    end: float
    owner: str = ""
    about: Mapping[str, Any] = {}


class Mark(NamedTuple):
    lane: str
    t: float
    text: str
    severity: str


class Point(NamedTuple):
    """A moment within a slice."""

    lane: str
    row: str
    t: float


class Flow(NamedTuple):
    name: str
    start: Point
    end: Point


Item = Slice | Mark | Flow
Span = tuple[float, float]


@dataclass(slots=True)
class _Group:
    owner: str
    row: int
    leased: float
    attempt: int
    accepted: float | None = None
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Tasks:
    """Tasks that a rollout worker has in hand, and the rows that are free for more."""

    held: int = 0
    since: float = 0.0  # It has some, or none, since then
    rows: int = 0
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
        self.held += 1
        if self.free:
            return heappop(self.free)
        self.rows += 1
        return self.rows

    def give_back(self, row: int) -> None:
        self.held -= 1
        heappush(self.free, row)


class Timeline:
    """Hands on each item once it is complete; ``open`` has what is not."""

    def __init__(self, emit: Callable[[Item], None], *, groups: bool = True) -> None:
        """``groups``: slices and flows of groups are handed on, too."""
        self._emit = emit
        self._each = groups
        self.t = self._before = 0.0  # Of the newest event, and of the one before
        self.roles = {RUN: RUN, SEATS: SEATS}  # By lane: role of its process
        self._rows: dict[tuple[str, str], Slice] = {}  # Open slices
        self._ends: dict[tuple[str, str], float] = {}  # End of the last slice of each row
        self._groups: dict[str, _Group] = {}
        self._tasks: dict[str, _Tasks] = {}
        self._leader = ""
        self._step: Mapping[str, Any] | None = None  # The open step, with its present shards
        self._opened = 0.0
        self._last_group = ""  # Worker whose group completed the open step
        self._votes: dict[str, tuple[float, Span | None]] = {}
        """Votes for it: when, and begin and end of the replica's forward and backward passes."""
        self._committed: dict[str, Span] = {}  # Of each replica: its last vote, and the commit
        self._broken: tuple[float, str] = 0.0, ""  # Newest end of a mesh epoch, and its cause
        self._gone = ""  # Worker that died last
        self._last_voter = ""
        self._version_at: dict[int, float] = {}
        self._newest_t = 0.0  # Newest commit
        self._swapped: dict[str, float] = {}  # Newest swap of each rollout worker

    def take(self, t: float, record: Mapping[str, Any]) -> None:
        """Takes the next event, journalled at ``t`` (Unix seconds)."""
        # A leader on another host may have another clock.
        if 0.0 < t < self.t - SET_BACK_S:
            self._set_back(t)
        self._before, self.t = self.t, max(self.t, t)
        if (handler := _HANDLERS.get(record["type"])) is not None:
            handler(self, record)
        if record.get("severity") in (Severity.WARNING, Severity.ERROR):
            named = (record.get(name) for name in ("worker_id", "name", "controller_id"))
            lane = next((name for name in named if name in self.roles), RUN)
            self._emit(Mark(lane, self.t, str(record.get("text", "")), str(record["severity"])))

    def _set_back(self, t: float) -> None:
        """From here on times are by a clock that shows ``t`` now."""
        self.t = self._opened = self._newest_t = t
        self._broken = t, self._broken[1]
        self._ends.clear()
        self._votes.clear()
        self._committed.clear()
        self._swapped.clear()
        self._version_at.clear()
        for place, s in self._rows.items():
            self._rows[place] = s._replace(start=min(s.start, t))
        for tasks in self._tasks.values():
            tasks.since = min(tasks.since, t)
        for group in self._groups.values():
            group.leased = min(group.leased, t)

    def open(self) -> Iterator[Slice]:
        """Slices that go on, up to the newest event, and groups without an outcome."""
        for (lane, row), s in self._rows.items():
            yield Slice(lane, row, s.name, s.kind, s.start, self.t, s.owner, {**s.about, "open": 1})
        for worker, tasks in self._tasks.items():
            name, kind = ("generates", "generate") if tasks.held else ("waits for tasks", "wait")
            yield Slice(worker, WORK, name, kind, tasks.since, self.t, about={"open": 1})
        step: Mapping[str, Any] = self._step or {"groups": (), "shards": ()}
        for worker in step["shards"]:
            start, kind = max(self._opened, self._ends.get((worker, WORK), 0.0)), "open"
            if worker in self._votes:
                start, kind = self._votes[worker][0], "wait"
            name = f"in step {step['step']}"
            yield Slice(worker, WORK, name, kind, start, self.t, about={"open": 1})
        in_step = frozenset(step["groups"])
        for task_id, group in self._groups.items() if self._each else ():
            state = "ready" if group.accepted else "being generated"
            if task_id in in_step:
                state = f"in step {step['step']}"
            yield self._slice_of(task_id, group, f"{state} at the end of the trace")

    # ---- slices ---------------------------------------------------------------------------

    def _slice(
        self, lane: str, row: str, name: str, kind: str, span: Span, owner: str = ""
    ) -> Span | None:
        """A slice after those that the row has; None: nothing is left of it. A worker's seconds
        and the leader's clock differ by the time of a message."""
        start, end = max(span[0], self._ends.get((lane, row), 0.0)), span[1]
        if end - start < LEAST_S:
            return None
        self._ends[lane, row] = end
        self._emit(Slice(lane, row, name, kind, start, end, owner))
        return start, end

    def _begin(self, lane: str, row: str, name: str, kind: str, owner: str = "") -> None:
        self._end(lane, row)
        self._rows[lane, row] = Slice(lane, row, name, kind, self.t, self.t, owner)

    def _end(self, lane: str, row: str, at: float | None = None) -> None:
        if (s := self._rows.pop((lane, row), None)) is not None:
            end = self.t if at is None else at
            self._slice(lane, row, s.name, s.kind, (s.start, end), s.owner)

    # ---- processes ------------------------------------------------------------------------

    def _term_begun(self, record: Mapping[str, Any]) -> None:
        leader, before = str(record["controller_id"]), self._leader
        self.roles.setdefault(leader, "controller")
        if before:
            self._end(before, PROCESS, self._before)
        if record.get("failover"):
            span = self._before, self.t
            self._slice(RUN, LEADER, f"no leader: waits for {leader}", "wait", span, before)
        self._leader = leader
        self._begin(leader, PROCESS, f"leads, term {record['term']}", "lead")

    def _registered(self, record: Mapping[str, Any]) -> None:
        worker, role = str(record["worker_id"]), str(record["role"])
        self.roles.setdefault(worker, role)
        self._drop_work(worker)
        self._begin(worker, PROCESS, f"starts, pid {record['pid']} on {record['host']}", "start")

    def _changed(self, record: Mapping[str, Any]) -> None:
        worker, lifecycle = str(record["worker_id"]), str(record["lifecycle"])
        current = self._rows.get((worker, PROCESS))
        if lifecycle == "stopped":
            self._end(worker, PROCESS)
            self._drop_work(worker)
            return
        if lifecycle != "starting" and (current is None or current.name != lifecycle):
            self._begin(worker, PROCESS, lifecycle, "run")
        if self.roles.get(worker) != "policy" and int(record["state_version"]) < 0:
            self._serves(worker, int(record["loaded_version"]))

    def _serves(self, worker: str, version: int) -> None:
        """The worker's engine serves ``version``; -1: none."""
        serving = self._rows.get((worker, WEIGHTS))
        name = f"version {version}"
        if version < 0 or (serving is not None and serving.name == name):
            if version < 0:
                self._end(worker, WEIGHTS)
            return
        self.roles.setdefault(worker, "rollout")
        self._begin(worker, WEIGHTS, name, "version")
        self._swapped[worker] = self.t
        if (committed := self._version_at.get(version)) is not None:
            start, end = Point(RUN, VERSIONS, committed), Point(worker, WEIGHTS, self.t)
            self._emit(Flow(name, start, end))

    def _died(self, record: Mapping[str, Any]) -> None:
        worker = str(record["worker_id"])
        self._gone = worker
        self._end(worker, WEIGHTS)
        self._drop_work(worker)
        why = str(record.get("cause") or record.get("how") or "")
        if why in NO_FAULT:  # nobody starts it again
            self._end(worker, PROCESS)
            return
        self._begin(worker, PROCESS, f"down ({why.replace('_', ' ')})", "down", "its launcher")
        down = [place for place, s in self._rows.items() if s.kind == "down"]
        for place in down[:-MOST_DOWN]:
            self._end(*place)

    def _drop_work(self, worker: str) -> None:
        """Whatever the process was doing is over."""
        self._votes.pop(worker, None)
        self._committed.pop(worker, None)
        if (tasks := self._tasks.pop(worker, None)) is not None:
            self._turn(worker, tasks, self.t, busy=tasks.held > 0)

    def _seat(self, record: Mapping[str, Any]) -> None:
        seat, worker = str(record["seat"]), str(record["worker_id"])
        if record["type"] == EventType.SEAT_GRANTED:
            self._begin(SEATS, seat, worker, "seat")
        elif (held := self._rows.get((SEATS, seat))) is not None and held.name == worker:
            self._end(SEATS, seat)

    # ---- groups ---------------------------------------------------------------------------

    def _leased(self, record: Mapping[str, Any]) -> None:
        worker = str(record["worker_id"])
        self.roles.setdefault(worker, "rollout")
        tasks = self._tasks.get(worker)
        if tasks is None:
            tasks = self._tasks[worker] = _Tasks(since=self.t)
        elif record["leases"] and not tasks.held:
            # A commit has made room for the task, or the weights that it had to have came.
            commit, swap = self._newest_t, self._swapped.get(worker, 0.0)
            for owner, until in (("the trainers", commit), ("its weights", swap)):
                if until > tasks.since:
                    self._turn(worker, tasks, until, busy=False, owner=owner)
            self._turn(worker, tasks, self.t, busy=False, owner="the leader")
        for task_id, attempt, *_ in record["leases"]:
            self._close(task_id, "leased again")
            self._groups[task_id] = _Group(worker, tasks.take(), self.t, int(attempt))

    def _accepted(self, record: Mapping[str, Any]) -> None:
        meta = record["group"]
        if (group := self._groups.get(meta["task_id"])) is None:
            return
        names = ("tokens", "sequences", "min_version", "max_version", "reward_mean")
        times = ("generate_s", "reward_s")
        group.about = {name: meta[name] for name in (*names, *times) if name in meta}
        group.accepted = self.t
        self._hand_in(group)

    def _hand_in(self, group: _Group) -> None:
        """The worker is done with the group."""
        if (tasks := self._tasks.get(group.owner)) is not None:
            tasks.give_back(group.row)
            if not tasks.held:
                self._turn(group.owner, tasks, self.t, busy=True)

    def _turn(
        self, worker: str, tasks: _Tasks, until: float, *, busy: bool, owner: str = ""
    ) -> None:
        """The worker was busy until then, or waited for tasks."""
        name, kind = ("generates", "generate") if busy else ("waits for tasks", "wait")
        name = f"{name}: {owner}" if owner else name
        self._slice(worker, WORK, name, kind, (tasks.since, until), owner)
        tasks.since = until

    def _ended(self, record: Mapping[str, Any]) -> None:
        why = str(record.get("reason") or record.get("fault") or "").replace("_", " ")
        self._close(str(record["task_id"]), f"{_ENDS[record['type']]}{why}")

    def _close(self, task_id: str, outcome: str) -> _Group | None:
        if (group := self._groups.pop(task_id, None)) is None:
            return None
        if group.accepted is None:
            self._hand_in(group)
        if self._each:
            self._emit(self._slice_of(task_id, group, outcome))
        return group

    def _slice_of(self, task_id: str, group: _Group, outcome: str) -> Slice:
        about = {"attempt": group.attempt, "outcome": outcome, **group.about}
        end = self.t if group.accepted is None else group.accepted
        row = f"task {group.row}"
        return Slice(group.owner, row, task_id, "group", group.leased, end, about=about)

    # ---- steps ----------------------------------------------------------------------------

    def _step_opened(self, record: Mapping[str, Any]) -> None:
        self._step, self._opened = record, self.t
        self._votes.clear()
        ready = [g for task in record["groups"] if (g := self._groups.get(task)) is not None]
        last = max(ready, key=lambda g: g.accepted or 0.0, default=None)
        self._last_group = last.owner if last is not None else ""

    def _resharded(self, record: Mapping[str, Any]) -> None:
        if self._step is not None:
            self._step = {**self._step, "shards": record["shards"]}
        self._votes.clear()

    def _voted(self, record: Mapping[str, Any]) -> None:
        worker, stats = str(record["worker_id"]), record["stats"]
        self.roles.setdefault(worker, "policy")
        self._last_voter = worker

        def seconds(part: str) -> float:
            total, weight, *_ = stats.get(f"time_{part}_s", (0.0, 0.0))
            # Whatever a replica reports.
            return min(max(0.0, float(total / weight)), self.t) if weight > 0 else 0.0

        if (last := self._committed.pop(worker, None)) is not None:
            voted, committed = last
            span = committed, voted + seconds("commit")
            self._slice(worker, WORK, "commits", "commit", span)
        reduced = self.t - seconds("reduce")
        computed = reduced - seconds("compute")
        self._waited_for_groups(worker, computed - seconds("wait"), computed)
        step = record["step"]
        span = computed, reduced
        drawn = self._slice(worker, WORK, f"computes step {step}", "compute", span)
        self._slice(worker, WORK, "reduces", "reduce", (reduced, self.t))
        self._votes[worker] = self.t, drawn

    def _waited_for_groups(self, worker: str, start: float, end: float) -> None:
        start = max(start, self._ends.get((worker, WORK), 0.0))
        broken, cause = self._broken
        if broken > start:
            self._slice(worker, WORK, "waits for a new mesh", "wait", (start, broken), cause)
        opened = min(max(self._opened, start), end)
        name = f"waits for groups: {self._last_group}" if self._last_group else "waits for groups"
        self._slice(worker, WORK, name, "wait", (start, opened), self._last_group)
        # The vote is journalled a message later than it was sent: that time is in here, too.
        owner = "plan and payloads"
        self._slice(worker, WORK, "gets its plan and groups", "wait", (opened, end), owner)

    def _step_committed(self, record: Mapping[str, Any]) -> None:
        number, version, metrics = record["step"], int(record["version"]), record["metrics"]
        opened = self._opened if self._step else self.t - (metrics.get("step_s") or 0.0)
        self._slice(RUN, STEPS, f"step {number}", "step", (opened, self.t))
        last = self._last_voter
        for worker, (voted, _) in self._votes.items():
            self._committed[worker] = span = voted, self.t
            self._slice(worker, WORK, f"waits for the vote of {last}", "wait", span, last)
        self._trained(number)
        self._step = None
        self._votes.clear()
        self._newest(version)

    def _newest(self, version: int) -> None:
        self._version_at[version] = self._newest_t = self.t
        if len(self._version_at) > MOST_VERSIONS:
            del self._version_at[min(self._version_at)]
        self._begin(RUN, VERSIONS, f"version {version}", "version")

    def _trained(self, number: int) -> None:
        """The groups of the open step are trained: their flows end where they were computed."""
        if self._step is None:
            return
        groups: list[str] = self._step["groups"]
        replica = {groups[n]: w for w, shard in self._step["shards"].items() for n in shard}
        for task_id in groups:
            group = self._close(task_id, f"trained in step {number}")
            if group is None or not self._each:
                continue
            worker = replica.get(task_id, "")
            _, computed = self._votes.get(worker, (0.0, None))
            end = Point(RUN, STEPS, (self._opened + self.t) / 2)
            if computed is not None:
                end = Point(worker, WORK, sum(computed) / 2)
            if end.t >= group.leased:
                start = Point(group.owner, f"task {group.row}", group.leased)
                self._emit(Flow(f"group {task_id}", start, end))

    def _step_aborted(self, record: Mapping[str, Any]) -> None:
        if self._step is not None and self._step["step"] == record["step"]:
            why = str(record["reason"]).replace("_", " ")
            name = f"step {record['step']} aborted: {why}"
            self._slice(RUN, STEPS, name, "step", (self._opened, self.t))
            self._step = None
        self._votes.clear()

    def _mesh_broken(self, record: Mapping[str, Any]) -> None:
        died = record["reason"] == "member_died"
        self._broken = self.t, self._gone if died else str(record["reason"]).replace("_", " ")

    def _rolled_back(self, record: Mapping[str, Any]) -> None:
        self._step = None
        self._votes.clear()
        self._committed.clear()
        self._newest(int(record["version"]))

    def _checkpoint(self, record: Mapping[str, Any]) -> None:
        span = self.t - float(record["seconds"]), self.t
        name = f"writes the checkpoint of step {record['step']}"
        self._slice(str(record["worker_id"]), "checkpoints", name, "checkpoint", span)

    def _evaluation(self, record: Mapping[str, Any]) -> None:
        name = f"evaluates step {record['step']}"
        for place in [place for place, s in self._rows.items() if s.name == name]:
            self._end(*place)
        if record["type"] == EventType.EVAL_SCHEDULED:
            # Evaluations of several steps may go on side by side.
            rows = (f"evaluations {n}" for n in count(1))
            row = next(row for row in rows if (RUN, row) not in self._rows)
            self._begin(RUN, row, name, "evaluate")


_ENDS: Mapping[str, str] = {
    EventType.EVAL_TASK_DONE: "scored",
    EventType.TASK_RELEASED: "released: ",
    EventType.TASK_DROPPED: "dropped: ",
    EventType.GROUP_LOST: "lost: ",
}
_HANDLERS: Mapping[str, Callable[[Timeline, Mapping[str, Any]], None]] = {
    EventType.RUN_STARTED: lambda timeline, _: timeline._newest(0),
    EventType.TERM_BEGUN: Timeline._term_begun,
    EventType.WORKER_REGISTERED: Timeline._registered,
    EventType.WORKER_CHANGED: Timeline._changed,
    EventType.WORKER_DIED: Timeline._died,
    EventType.SEAT_GRANTED: Timeline._seat,
    EventType.SEAT_RETURNED: Timeline._seat,
    EventType.TASKS_LEASED: Timeline._leased,
    EventType.GROUP_ACCEPTED: Timeline._accepted,
    **dict.fromkeys(_ENDS, Timeline._ended),
    EventType.STEP_OPENED: Timeline._step_opened,
    EventType.STEP_RESHARDED: Timeline._resharded,
    EventType.VOTE_CAST: Timeline._voted,
    EventType.STEP_COMMITTED: Timeline._step_committed,
    EventType.STEP_ABORTED: Timeline._step_aborted,
    EventType.MESH_BROKEN: Timeline._mesh_broken,
    EventType.ROLLED_BACK: Timeline._rolled_back,
    EventType.CHECKPOINT_RECORDED: Timeline._checkpoint,
    EventType.EVAL_SCHEDULED: Timeline._evaluation,
    EventType.EVAL_RECORDED: Timeline._evaluation,
}
