"""Request bodies, replies and problem details (RFC 9457) of the REST interface: the schema that
OpenAPI publishes. The ledger's ``StatusView`` and ``TaskCounts`` and the read model's
``ListedEvent`` and ``SavedCheckpoint`` are replies as they are. A fault of the controller is a
generic 500; the stack trace is only in its log."""

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field
from starlette.exceptions import HTTPException

from controller.ledger.state.settings import SettingChange
from controller.ledger.views.views import StatusView, TaskCounts
from paceline.config.sections.scorers import PREFIX
from paceline.observe.event_history import DOCUMENTED, ListedEvent, SavedCheckpoint


class Reply(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class ProblemModel(Reply):
    """RFC 9457 problem details."""

    model_config = ConfigDict(title="Problem")

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str


class MetricRow(Reply):
    """Committed step with its metrics."""

    model_config = ConfigDict(extra="allow")

    step: int
    version: int
    t: float
    """Unix seconds."""


class StepsReply(Reply):
    steps: list[MetricRow]
    next: int
    """``since`` of the next request."""


class WorkerReply(Reply):
    worker_id: str
    role: str
    scorer: str
    """Name of the scorer in the config, if it is a scorer."""
    host: str
    pid: int
    incarnation: str
    """Differs for every process of that name. Text: a browser's numbers have 53 bits."""
    state: str
    """starting, running, spare, suspect, draining, stopped or dead."""
    mesh_epoch: int
    version: int
    """Version of the weights it holds or serves; -1: none."""
    heartbeat_age_s: float
    """-1: unknown, as only the leader receives heartbeats."""
    activity: str
    held_leases: int
    gauges: dict[str, float]


class ControllerReply(Reply):
    controller_id: str
    address: str
    rest: str
    state: str
    """leader, standby or silent."""
    pid: int
    host: str
    heartbeat_age_s: float


class SinkReply(Reply):
    name: str
    written: int
    """Points written in this term."""
    failing: bool
    trouble: str
    """Error of the last attempt; empty if it succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReply(StatusView):
    """The ledger's status, and what this controller knows of the run besides."""

    __pydantic_config__ = DOCUMENTED

    max_staleness: int
    started_t: float
    """Unix seconds; 0: not started."""
    ended_t: float
    """Unix seconds; 0: not ended."""
    controllers: list[ControllerReply]
    served_by: str
    """The controller that answers."""
    bottleneck: str
    """The limit of the run, or the cause for which it waits, in a sentence."""
    time_left_s: float | None
    """Estimate by the median of the newest 20 steps; null if unknown or if the run is over."""
    stalled_s: float
    """Time since the last commit if that is far longer than a step, else 0."""
    proposed: dict[str, int]
    """Worker counts that the autoscaler proposes; empty: the desired counts."""
    proposed_why: str
    workers: dict[str, int]
    """Living workers of each pool."""
    provider_trouble: str
    """Reason for which the fleet differs from the desired counts; only the leader knows."""
    sinks: list[SinkReply]
    """Metric sinks; only the leader has any."""
    changed: dict[str, SettingChange]
    """Settings that are not what the run was started with, by dotted name."""


class MetricsReply(Reply):
    """Curves: every list has as many values as ``x``; null if none was measured. If there are more
    steps than points, a value is the mean of a bucket of steps, and ``low`` and ``high`` are the
    bucket's extremes. Otherwise ``low`` and ``high`` are empty."""

    x: list[int]
    """Steps."""
    t: list[float]
    """Unix seconds."""
    series: dict[str, list[float | None]]
    low: dict[str, list[float | None]]
    high: dict[str, list[float | None]]
    evals: list[dict[str, float | None]]
    """Held-out evaluations."""
    names: list[str]
    """All metrics of the run."""


class EventsReply(Reply):
    events: list[ListedEvent]
    """Oldest first."""
    next: str
    """``since`` of the next request."""


class DroppedTask(Reply):
    task_id: str
    attempt: int
    reason: str
    detail: str
    t: float


class FailingTask(Reply):
    """A task that waits for another attempt."""

    task_id: str
    attempt: int
    failures: list[str]


class TasksReply(Reply):
    counts: TaskCounts
    quarantined: list[DroppedTask]
    """Given up, newest first. Routine drops are only counted."""
    failing: list[FailingTask]


class GroupSummary(Reply):
    group_id: str
    attempt: int
    state: str
    """ready, in_step, trained or dropped."""
    owner: str = ""
    """Empty: not known."""
    sequences: int = 0
    """0: dropped before a group was handed in."""
    tokens: int = 0
    reward_mean: float = 0.0
    reward_std: float = 0.0
    reward_max: float = 0.0
    min_version: int = -1
    max_version: int = -1
    staleness: int = 0
    """Staleness of its oldest token, in steps, at the step that trains it or at the next one."""
    step: int = 0
    """The step that trains it; 0: not known yet."""
    epoch: int = -1
    """Pass over the data set; -1: not known."""
    dataset_row: int = -1
    """Row of the data set that its prompt comes from; -1: not known."""
    reason: str = ""
    """Reason of the drop."""
    detail: str = ""
    lengths: list[int] = []
    """Tokens of each sequence, prompt included, of a group that could not be trained."""
    dropped_t: float = 0.0
    """Unix seconds; 0: not dropped."""


class CompletionReply(Reply):
    text: str
    token_count: int
    tokens: list[int] = []
    """Empty if the completion comes from the sample archive."""
    logprobs: list[float] = []
    versions: list[tuple[int, int]]
    """(version, number of tokens)."""
    finish_reason: str
    reward: float
    reward_components: dict[str, float]
    relative_reward: float = Field(validation_alias=AliasChoices("relative_reward", "advantage"))
    """(reward - mean of the group) / standard deviation of the group; 0 if all are equal."""


class GroupsReply(Reply):
    groups: list[GroupSummary]
    total: int
    """Groups that match, before the limit."""


class GroupReply(GroupSummary):
    prompt: str
    completions: list[CompletionReply]
    """Empty if the sample archive has the facts of the group only."""
    generate_s: float = 0.0
    reward_s: float = 0.0


class AgesReply(Reply):
    """Ages of what the newest step trained, and what it left out for its age."""

    late_share: float
    """Share of its groups that are older than max_staleness."""
    masked_share: float
    """Share of its tokens that are older than max_token_age."""
    dropped_share: float
    """Groups that were dropped for their age since the step before, of those and its own."""
    uninformative_share: float
    """The same of groups whose rewards are all equal."""
    response_tokens: dict[str, float]
    """Mean length of a completion: all (that the step trains), late, masked (at least in part),
    dropped, uninformative. Absent if there is none."""
    token_ages: dict[str, float]
    """Share of its trained tokens by age in steps: 0, 1, 2, 3-4, ..., 33+."""
    ess: float | None
    """Effective sample size of the importance weights, as a share of the tokens."""


class FlowReply(Reply):
    bottleneck: str
    """The limit of the run, or the cause for which it waits, in a sentence."""
    stalled_s: float
    """Time since the last commit if that is far longer than a step: the rates are old then."""
    tasks: TaskCounts
    staleness: dict[str, int]
    """Groups that are ready or in a step, by the staleness of their oldest token."""
    max_staleness: int
    late_groups: str
    """train or drop: what becomes of groups that are older than max_staleness."""
    max_token_age: int
    """Age of the oldest token that is trained."""
    ages: AgesReply | None
    """Ages in the newest step; null before the first."""
    groups_per_step: int
    group_size: int
    tokens_per_s: float
    """Trained tokens, of the newest step."""
    samples_per_s: float
    time_split_s: dict[str, float]
    """Seconds of the newest step by part; trainers: mean of the replicas."""
    step_s: float
    workers: dict[str, int]
    """Living workers by role."""


class CulpritReply(Reply):
    """Process or thing that the run waits for."""

    kind: str
    """worker, starting_worker, controller, redis, dataset, hub, model, reward, environment,
    checkpoint, network, user or none."""
    name: str
    host: str
    pid: int
    """0: it is no process."""


class WhyReply(Reply):
    sentence: str
    """The whole diagnosis, without the remedy."""
    subject: str
    """The part of the run that waits."""
    since_s: float
    culprit: CulpritReply
    because: str
    next: str
    """The next thing that happens if nobody does anything."""
    remedy: str
    """Empty: nothing is needed."""
    severity: str
    """ok, slow or stuck."""
    controller_id: str
    """The controller that answers."""
    leads: bool
    """A standby sees no heartbeats."""
    bottleneck: str
    """Bottleneck of a run that makes progress: trainers, generation, rewards,
    staleness, controller, weights or none. Empty: not known."""
    pace: str
    """The same in a sentence, with the remedy."""
    faults: str
    """Faults so far, their causes, what they cost, and a suspected host. Empty: there were none."""


CheckpointsReply = list[SavedCheckpoint]


class Done(Reply):
    accepted: bool
    message: str


def _integral(value: Any) -> Any:
    """JSON Schema counts 3.0 as an integer; strict types alone would refuse it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=0, le=100_000, strict=True), BeforeValidator(_integral)]


class DesiredCounts(BaseModel):
    model_config = ConfigDict(extra="forbid")

    policy: Count | None = None
    rollout: Count | None = None
    scorers: dict[Annotated[str, Field(max_length=64)], Count] = Field(default_factory=dict)
    """By the name of the scorer: {"helpful": 3}."""

    @property
    def by_pool(self) -> dict[str, int]:
        """Counts as in `desired` of the run: {"policy": 1, "scorer:helpful": 3}."""
        named = {"policy": self.policy, "rollout": self.rollout}
        named |= {PREFIX + name: count for name, count in self.scorers.items()}
        return {pool: count for pool, count in named.items() if count is not None}


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    request_id: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    """Idempotency key. Empty: the request counts as a new one."""


class ScaleBody(DesiredCounts, RequestBody):
    """Desired counts; a role that is not named keeps its count."""

    expected: DesiredCounts | None = None
    """Desired counts that the caller saw: 409 if they have changed since."""


class DrainBody(RequestBody):
    replace: Annotated[bool, Field(strict=True)] = False
    """Start another worker in its place. Otherwise the desired count drops by one."""
    incarnation: Annotated[str, Field(pattern=r"^[0-9]{0,20}$")] = ""
    """Process that is meant: 409 if another one has its name by now."""


class SettingsBody(RequestBody):
    settings: Annotated[dict[str, Any], Field(min_length=1, max_length=64)]
    """Values by dotted name: {"train.optimizer.lr": 5e-7}. 422 names a setting that is fixed, and
    what works."""
    dry_run: Annotated[bool, Field(strict=True)] = False
    """Check only, and say what would change."""


class SettingsDone(Done):
    changes: dict[str, SettingChange]
    """By dotted name. Empty if the request was repeated."""


class StopBody(RequestBody):
    reason: Annotated[str, Field(max_length=256)] = "stopped by request"


MEDIA_TYPE = "application/problem+json"
_RFC_9110 = {413: "Content Too Large", 422: "Unprocessable Content"}
"""Phrases that differ between versions of Python."""
TITLES = {status.value: status.phrase for status in HTTPStatus} | _RFC_9110


class Problem(HTTPException):
    """Raised anywhere in a handler; the response is made from it."""


def respond(
    status: int, detail: str, instance: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    body = ProblemModel(title=TITLES[status], status=status, detail=detail, instance=instance)
    return JSONResponse(body.model_dump(), status, headers, media_type=MEDIA_TYPE)


def answer_problems(app: FastAPI) -> None:
    """Makes every error of ``app`` a problem details response."""

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return respond(error.status_code, error.detail, request.url.path, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        errors = [f"{'.'.join(str(x) for x in e['loc'])}: {e['msg']}" for e in error.errors()]
        kind = request.headers.get("content-type", "")
        if any(tuple(e["loc"]) == ("body",) for e in error.errors()) and "json" not in kind:
            errors = ["body: it is read as JSON only if the Content-Type is application/json"]
        return respond(422, "; ".join(errors[:8]), request.url.path)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        # The server logs the stack trace.
        return respond(500, "internal error of the controller: see its log", request.url.path)


def documented(*codes: int) -> dict[int | str, dict[str, object]]:
    """``responses`` of a route: the problems it may return."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        code: {"description": TITLES[code], "content": {MEDIA_TYPE: {"schema": schema}}}
        for code in codes
    }
