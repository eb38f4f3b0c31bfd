"""What has happened, as the journal keeps it.

An event is a fact that has been decided: applying it never fails and never decides. In the journal
it is a JSON object with ``type`` and the event's own fields; ``to_json`` and ``from_json`` are exact
inverses. Times are Unix seconds as the deciding leader saw them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from controller.ledger.commands import GroupFacts, Kind, LeasedTask, Role, RunSpec, StatValue


@dataclass(frozen=True, slots=True)
class RunStarted:
    facts: RunSpec
    t: float


@dataclass(frozen=True, slots=True)
class TermBegun:
    """``controller_id`` leads from here on; nothing of an earlier term follows."""

    term: int
    controller_id: str
    t: float


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    worker_id: str
    incarnation: int
    role: Role
    host: str
    pid: int
    tensor_host: str
    ranks: int
    state_version: int
    """As believed: -1 where the worker claims a state it was found to have wrong."""
    spare: bool = False
    """Rollout: it leases nothing until it is wanted."""


@dataclass(frozen=True, slots=True)
class WorkerDied:
    worker_id: str
    incarnation: int
    how: str
    detail: str


@dataclass(frozen=True, slots=True)
class SpareSet:
    """Whether a rollout worker stands by, or works."""

    worker_id: str
    incarnation: int
    spare: bool


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker's own word about itself: lifecycle, state it holds, weights it serves."""

    worker_id: str
    incarnation: int
    lifecycle: str
    state_version: int
    loaded_version: int
    diverged_version: int = -1
    """What it said to hold though it was never committed; -1: nothing of the kind."""


@dataclass(frozen=True, slots=True)
class TasksLeased:
    """The reply to ``lease_seq``: a retry gets it again."""

    worker_id: str
    incarnation: int
    lease_seq: int
    leases: tuple[LeasedTask, ...]


@dataclass(frozen=True, slots=True)
class GroupAccepted:
    """The training group is ready; its payload is stored under (task_id, attempt)."""

    worker_id: str
    group: GroupFacts


@dataclass(frozen=True, slots=True)
class TaskReleased:
    """The lease is over; the task goes back to the front of the queue."""

    task_id: str
    attempt: int
    worker_id: str
    reason: str
    """owner_died, owner_stopped, lease_expired, hand_back, or why the attempt failed."""
    counts: bool
    """Whether this try counts towards quarantine."""
    detail: str = ""
    suspected: bool = False
    """The owner died with it, and it may have been the reason."""


@dataclass(frozen=True, slots=True)
class TaskDropped:
    """Finished without being trained, for good. Another task takes its place."""

    task_id: str
    attempt: int
    reason: str
    """stale, uninformative, quarantined, run_ended, or the worker's own reason."""
    detail: str = ""
    verdict: str = "duplicate"
    """What a repeated submission of this attempt is told."""


@dataclass(frozen=True, slots=True)
class Member:
    worker_id: str
    incarnation: int
    tensor_host: str
    needs_state: bool


@dataclass(frozen=True, slots=True)
class MeshBroken:
    """The epoch is over for all its members."""

    epoch: int
    reason: str
    """peer_error, member_died, diverged, lost_commit, membership."""
    detail: str = ""
    diverged: tuple[str, ...] = ()
    """Members whose weights differed from the majority's: they hold no state from here on."""
    broken_t: float = 0.0
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class MeshFormed:
    epoch: int
    members: tuple[Member, ...]
    """In rank order."""
    state_version: int
    step: int
    source_rank: int
    restore: bool
    checkpoint_path: str


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Nobody living holds the newest state: the run stands after ``step`` again, as ``version``."""

    step: int
    version: int
    from_step: int
    from_version: int
    checkpoint_path: str


@dataclass(frozen=True, slots=True)
class LinkAssigned:
    """A weights link; replaces the receiver's earlier one."""

    epoch: int
    publisher: str
    publisher_incarnation: int
    receiver: str
    receiver_incarnation: int


@dataclass(frozen=True, slots=True)
class StepOpened:
    step: int
    version: int
    mesh_epoch: int
    groups: tuple[str, ...]
    """Task ids of the batch, in the order they were chosen."""
    shards: Mapping[str, tuple[int, ...]]
    """Worker id to positions in ``groups``."""
    replay: bool
    """A composition that an abandoned step had already trained."""


@dataclass(frozen=True, slots=True)
class StepResharded:
    """The open step goes on in a new epoch, with a lost member's groups dealt to the others."""

    step: int
    mesh_epoch: int
    shards: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class VoteCast:
    worker_id: str
    incarnation: int
    step: int
    mesh_epoch: int
    digest: str
    stats: Mapping[str, StatValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """Every member of the epoch voted for it, with equal weights. ``version`` is the state after."""

    step: int
    version: int
    metrics: Mapping[str, float]
    t: float


@dataclass(frozen=True, slots=True)
class StepAborted:
    """No member of the step is left: its groups are ready again."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRecorded:
    worker_id: str
    step: int
    version: int
    path: str
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EvalScheduled:
    step: int
    version: int
    rows: int


@dataclass(frozen=True, slots=True)
class EvalTaskDone:
    task_id: str
    attempt: int
    worker_id: str
    reward_mean: float


@dataclass(frozen=True, slots=True)
class EvalRecorded:
    step: int
    version: int
    reward_mean: float | None
    """None where every row failed: that is no reward of 0."""
    count: int
    """Rows that were scored."""


@dataclass(frozen=True, slots=True)
class Scaled:
    request_id: str
    desired: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class BoundsSet:
    """Least and most wanted workers from here on; see RunSpec.bounds."""

    bounds: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Drained:
    request_id: str
    worker_id: str
    desired: Mapping[str, int] = field(default_factory=dict)
    """Wanted workers that change with it; empty where the worker is to be replaced."""


@dataclass(frozen=True, slots=True)
class Paused:
    request_id: str
    paused: bool


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """Someone wants a checkpoint of ``step``, the next one that can still be told to the replicas."""

    request_id: str
    step: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RunFinished:
    reason: str
    """completed, or why it was stopped early."""
    t: float


@dataclass(frozen=True, slots=True)
class RunFailed:
    request_id: str
    reason: str
    t: float


Event = (
    RunStarted
    | TermBegun
    | WorkerRegistered
    | WorkerDied
    | WorkerChanged
    | SpareSet
    | TasksLeased
    | GroupAccepted
    | TaskReleased
    | TaskDropped
    | MeshBroken
    | MeshFormed
    | RolledBack
    | LinkAssigned
    | StepOpened
    | StepResharded
    | VoteCast
    | StepCommitted
    | StepAborted
    | CheckpointRecorded
    | EvalScheduled
    | EvalTaskDone
    | EvalRecorded
    | Scaled
    | BoundsSet
    | Drained
    | Paused
    | CheckpointRequested
    | StopRequested
    | RunFinished
    | RunFailed
)

TYPES: dict[str, type[Any]] = {kind.__name__: kind for kind in Event.__args__}


def to_json(event: Event) -> dict[str, Any]:
    """The event as a JSON object: ``type`` and its fields; a group's facts are laid out flat."""
    kind = type(event)
    names, encoders = _LAYOUT[kind]
    out: dict[str, Any] = {"type": kind.__name__}
    if kind is GroupAccepted:
        assert isinstance(event, GroupAccepted)
        out["worker_id"] = event.worker_id
        group = event.group
        for name in _GROUP_FIELDS:
            out[name] = getattr(group, name)
        return out
    for name in names:
        value = getattr(event, name)
        encode = encoders.get(name)
        out[name] = value if encode is None else encode(value)
    return out


def from_json(data: Mapping[str, Any]) -> Event:
    """Inverse of ``to_json``. Raises ValueError for a type this program does not know."""
    kind = TYPES.get(data["type"])
    if kind is None:
        raise ValueError(f"the journal has an event of unknown type {data['type']!r}")
    if kind is GroupAccepted:
        return GroupAccepted(data["worker_id"], GroupFacts(*[data[n] for n in _GROUP_FIELDS]))
    names, _ = _LAYOUT[kind]
    decoders = _DECODE.get(kind, {})
    values = {n: decoders[n](data[n]) if n in decoders else data[n] for n in names if n in data}
    event: Event = kind(**values)
    return event


def lease_to_json(lease: LeasedTask) -> list[Any]:
    return [
        lease.task_id,
        lease.attempt,
        str(lease.kind),
        lease.epoch,
        lease.index,
        lease.seed,
    ]


def lease_from_json(data: list[Any]) -> LeasedTask:
    return LeasedTask(data[0], data[1], Kind(data[2]), data[3], data[4], data[5])


def facts_to_json(facts: RunSpec) -> dict[str, Any]:
    return {n: dict(v) if isinstance(v := getattr(facts, n), Mapping) else v for n in _FACT_FIELDS}


def facts_from_json(data: Mapping[str, Any]) -> RunSpec:
    return RunSpec(**data)


def stats_to_json(stats: Mapping[str, StatValue]) -> dict[str, list[float]]:
    return {name: [s.sum, s.weight, s.max] for name, s in stats.items()}


def stats_from_json(data: Mapping[str, list[float]]) -> dict[str, StatValue]:
    return {name: StatValue(*values) for name, values in data.items()}


def _shards_to_json(shards: Mapping[str, tuple[int, ...]]) -> dict[str, list[int]]:
    return {worker: list(positions) for worker, positions in shards.items()}


def _shards_from_json(data: Mapping[str, list[int]]) -> dict[str, tuple[int, ...]]:
    return {worker: tuple(positions) for worker, positions in data.items()}


_GROUP_FIELDS = tuple(f.name for f in fields(GroupFacts))
_FACT_FIELDS = tuple(f.name for f in fields(RunSpec))

_ENCODE: dict[type[Any], dict[str, Callable[[Any], Any]]] = {
    RunStarted: {"facts": facts_to_json},
    WorkerRegistered: {"role": str},
    TasksLeased: {"leases": lambda leases: [lease_to_json(x) for x in leases]},
    MeshBroken: {"diverged": list},
    MeshFormed: {"members": lambda members: [asdict(m) for m in members]},
    StepOpened: {"groups": list, "shards": _shards_to_json},
    StepResharded: {"shards": _shards_to_json},
    VoteCast: {"stats": stats_to_json},
    StepCommitted: {"metrics": dict},
    Scaled: {"desired": dict},
    BoundsSet: {"bounds": dict},
    Drained: {"desired": dict},
}

_DECODE: dict[type[Any], dict[str, Callable[[Any], Any]]] = {
    RunStarted: {"facts": facts_from_json},
    WorkerRegistered: {"role": Role},
    TasksLeased: {"leases": lambda leases: tuple(lease_from_json(x) for x in leases)},
    MeshBroken: {"diverged": tuple},
    MeshFormed: {"members": lambda members: tuple(Member(**m) for m in members)},
    StepOpened: {"groups": tuple, "shards": _shards_from_json},
    StepResharded: {"shards": _shards_from_json},
    VoteCast: {"stats": stats_from_json},
}

_LAYOUT: dict[type[Any], tuple[tuple[str, ...], dict[str, Callable[[Any], Any]]]] = {
    kind: (tuple(f.name for f in fields(kind)), _ENCODE.get(kind, {})) for kind in TYPES.values()
}
