"""What the REST interface says, field by field: the schema that OpenAPI publishes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class ProblemModel(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(title="Problem")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str


class Tasks(BaseModel):
    """Groups by state: dispatched is the sum of the others."""

    dispatched: int
    pending: int
    leased: int
    ready: int
    in_step: int
    trained: int
    dropped: dict[str, int]


class MetricRow(BaseModel):
    """One committed step."""

    model_config = ConfigDict(extra="allow")

    step: int
    version: int
    t: float


class Steps(BaseModel):
    steps: list[MetricRow]
    next: Annotated[int, Field(description="since of the next request")]


class Worker(BaseModel):
    worker_id: Annotated[str, Field(examples=["rollout-0"])]
    role: Annotated[str, Field(examples=["rollout"])]
    host: str
    pid: int
    incarnation: Annotated[
        str, Field(description="Another for every process of that name", examples=["17293"])
    ]
    state: Annotated[
        str, Field(description="starting, running, spare, suspect, draining, stopped, dead")
    ]
    mesh_epoch: int
    version: Annotated[int, Field(description="Weights it holds or serves; -1: none")]
    heartbeat_age_s: Annotated[float, Field(description="-1: only the leader knows")]
    activity: str
    held_leases: int
    gauges: dict[str, float]


class ControllerInfo(BaseModel):
    controller_id: str
    address: str
    rest: str
    state: Annotated[str, Field(description="leader, standby or silent")]
    pid: int
    host: str
    heartbeat_age_s: float


class SinkState(BaseModel):
    name: Annotated[str, Field(examples=["tensorboard"])]
    written: Annotated[int, Field(description="Points in this term")]
    failing: bool
    trouble: Annotated[str, Field(description="Why the last try failed; empty: it did not")]


class Run(BaseModel):
    run_id: str
    run_name: str
    phase: Annotated[str, Field(examples=["running"])]
    reason: str
    leader: str
    term: int
    step: int
    total_steps: int
    version: int
    max_staleness: int
    mesh_epoch: int
    checkpoint_step: int
    started_t: Annotated[float, Field(description="Unix seconds; 0: not started")]
    ended_t: Annotated[float, Field(description="Unix seconds; 0: not ended")]
    tasks: Tasks
    desired: dict[str, int]
    metrics: Annotated[dict[str, float], Field(description="Of the newest committed step")]
    failovers: int
    mesh_rebuilds: int
    rollbacks: int
    controllers: list[ControllerInfo]
    served_by: Annotated[str, Field(description="The controller that answers")]
    bottleneck: Annotated[str, Field(description="Who waits for whom, in a sentence")]
    time_left_s: Annotated[
        float | None,
        Field(description="By the median of the newest 20 steps; null: not known, or over"),
    ]
    stalled_s: Annotated[
        float, Field(description="Since the last commit, where far longer than a step; else 0")
    ]
    proposed: Annotated[
        dict[str, int],
        Field(description="Workers the autoscaler would have; empty: as many as are wanted"),
    ]
    proposed_why: str
    provider_trouble: Annotated[
        str,
        Field(description="What keeps the wanted workers from being there; only the leader knows"),
    ]
    sinks: Annotated[list[SinkState], Field(description="Where curves go; only the leader knows")]
    samples_trained: int
    tokens_trained: int


class Series(BaseModel):
    """Curves: equally many values as x in every list; null where none was measured.

    Where there are more steps than points, a value is the mean of a bucket of steps, and ``low`` and
    ``high`` are the bucket's lowest and highest; else they are empty.
    """

    x: Annotated[list[int], Field(description="Steps")]
    t: Annotated[list[float], Field(description="Unix seconds")]
    series: dict[str, list[float | None]]
    low: dict[str, list[float | None]]
    high: dict[str, list[float | None]]
    evals: Annotated[list[dict[str, float | None]], Field(description="Held-out evaluations")]
    names: Annotated[list[str], Field(description="All metrics there are")]


class Event(BaseModel):
    id: Annotated[str, Field(description="Pass as since, or as Last-Event-ID, to go on after it")]
    t: Annotated[float, Field(description="Unix seconds")]
    type: Annotated[str, Field(examples=["WorkerDied"])]
    step: Annotated[int, Field(description="Committed steps when it happened")]
    severity: Annotated[str, Field(description="fault, change or routine")]
    text: Annotated[str, Field(description="In plain words")]
    noticed: Annotated[str, Field(description="How a fault was noticed")]
    mesh_s: Annotated[
        float | None, Field(description="Of a fault: seconds until the next mesh was formed")
    ]
    commit_s: Annotated[
        float | None, Field(description="Of a fault: seconds until the next step was committed")
    ]
    fields: dict[str, Any]


class Events(BaseModel):
    events: Annotated[list[Event], Field(description="Oldest first")]
    next: Annotated[str, Field(description="since of the next request")]


class DroppedTask(BaseModel):
    task_id: str
    attempt: int
    reason: str
    detail: str
    t: float


class FailingTask(BaseModel):
    """Waits for another try."""

    task_id: str
    attempt: int
    failures: list[str]


class TaskDetail(BaseModel):
    counts: Tasks
    quarantined: Annotated[
        list[DroppedTask], Field(description="Given up, newest first; routine drops only counted")
    ]
    failing: list[FailingTask]


class GroupSummary(BaseModel):
    group_id: Annotated[str, Field(examples=["t17"])]
    attempt: int
    state: Annotated[str, Field(description="ready, in_step, trained or dropped")]
    owner: str
    sequences: int
    tokens: int
    reward_mean: float
    reward_std: float
    reward_max: float
    min_version: int
    max_version: int
    staleness: Annotated[
        int, Field(description="Of its oldest token, in steps, at its step or the next one")
    ]
    step: Annotated[int, Field(description="That trains it; 0: not known yet")]
    reason: Annotated[
        str,
        Field(
            description="Why it was dropped; of one that nothing was handed in for, sequences is 0",
            examples=["stale"],
        ),
    ] = ""
    detail: str = ""
    dropped_t: Annotated[float, Field(description="Unix seconds; 0: not dropped")] = 0.0


class CompletionDetail(BaseModel):
    text: str
    tokens: list[int]
    logprobs: list[float]
    versions: Annotated[list[tuple[int, int]], Field(description="(version, number of tokens)")]
    finish_reason: str
    reward: float
    reward_components: dict[str, float]
    advantage: Annotated[float, Field(description="Reward less the group's mean, over its spread")]


class Groups(BaseModel):
    groups: list[GroupSummary]
    total: Annotated[int, Field(description="Groups that match, before the limit")]


class GroupDetail(GroupSummary):
    prompt: str
    completions: list[CompletionDetail]
    generate_s: float
    reward_s: float


class Flow(BaseModel):
    """Who waits for whom."""

    bottleneck: str
    stalled_s: Annotated[
        float,
        Field(description="Since the last commit, where far longer than a step: rates are old"),
    ]
    tasks: Tasks
    staleness: Annotated[
        dict[str, int], Field(description="Groups ready or in a step, by the age of their tokens")
    ]
    max_staleness: int
    groups_per_step: int
    group_size: int
    tokens_per_s: Annotated[float, Field(description="Trained, of the newest step")]
    samples_per_s: float
    time_split_s: Annotated[
        dict[str, float], Field(description="Of the newest step; trainers: mean of the replicas")
    ]
    step_s: float
    workers: Annotated[dict[str, int], Field(description="Living workers by role")]


class VersionEpoch(BaseModel):
    version: int
    step: int
    workers: Annotated[list[str], Field(description="Who holds or serves it")]


class Checkpoint(BaseModel):
    step: int
    version: int
    path: Annotated[str, Field(description="Below the run directory")]
    size_bytes: int
    t: float


class Done(BaseModel):
    accepted: bool
    message: str


Count = Annotated[int, Field(ge=0, le=100_000, strict=True)]


class Counts(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"rollout": 2}]})

    policy: Count | None = None
    rollout: Count | None = None


class ScaleBody(BaseModel):
    """Of a role that is not named nothing changes."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"policy": 3, "rollout": 4}, {"rollout": 4, "expected": {"rollout": 2}}]
        },
    )

    policy: Count | None = None
    rollout: Count | None = None
    expected: Annotated[
        Counts | None,
        Field(description="What the caller saw as wanted: 409 where it is no longer so"),
    ] = None
    request_id: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = ""


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{}]})

    request_id: Annotated[
        str,
        Field(
            max_length=64,
            pattern=r"^[A-Za-z0-9_.-]*$",
            description="Idempotency key; empty: the request counts as a new one",
        ),
    ] = ""


class DrainBody(RequestBody):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"replace": True}]})

    replace: Annotated[
        bool,
        Field(
            strict=True,
            description="Another takes its place; else one worker fewer is wanted from then on",
        ),
    ] = False
    incarnation: Annotated[
        str,
        Field(
            pattern=r"^[0-9]{0,20}$",
            description="Of the process that is meant: 409 where another has its name by now",
        ),
    ] = ""


class StopBody(RequestBody):
    reason: Annotated[str, Field(max_length=256)] = "stopped by request"
