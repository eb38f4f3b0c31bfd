from paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SuspendStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUSPEND_STAGE_UNSPECIFIED: _ClassVar[SuspendStage]
    SUSPEND_STAGE_FINISH_STEP: _ClassVar[SuspendStage]
    SUSPEND_STAGE_LEAVE_STEP: _ClassVar[SuspendStage]
    SUSPEND_STAGE_AT_ONCE: _ClassVar[SuspendStage]
SUSPEND_STAGE_UNSPECIFIED: SuspendStage
SUSPEND_STAGE_FINISH_STEP: SuspendStage
SUSPEND_STAGE_LEAVE_STEP: SuspendStage
SUSPEND_STAGE_AT_ONCE: SuspendStage

class WhyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WhyReply(_message.Message):
    __slots__ = ("sentence", "subject", "since_s", "culprit", "because", "next", "remedy", "severity", "controller_id", "leads", "bottleneck", "pace", "faults")
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    BECAUSE_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_ID_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    BOTTLENECK_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    subject: str
    since_s: float
    culprit: Culprit
    because: str
    next: str
    remedy: str
    severity: str
    controller_id: str
    leads: bool
    bottleneck: str
    pace: str
    faults: str
    def __init__(self, sentence: _Optional[str] = ..., subject: _Optional[str] = ..., since_s: _Optional[float] = ..., culprit: _Optional[_Union[Culprit, _Mapping]] = ..., because: _Optional[str] = ..., next: _Optional[str] = ..., remedy: _Optional[str] = ..., severity: _Optional[str] = ..., controller_id: _Optional[str] = ..., leads: _Optional[bool] = ..., bottleneck: _Optional[str] = ..., pace: _Optional[str] = ..., faults: _Optional[str] = ...) -> None: ...

class Culprit(_message.Message):
    __slots__ = ("kind", "name", "host", "pid")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    host: str
    pid: int
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "host", "pid", "state", "mesh_epoch", "version", "heartbeat_age_s", "activity", "gauges", "held_leases", "incarnation", "scorer", "seat")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MESH_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: _common_pb2.Role
    host: str
    pid: int
    state: str
    mesh_epoch: int
    version: int
    heartbeat_age_s: float
    activity: str
    gauges: _containers.ScalarMap[str, float]
    held_leases: int
    incarnation: int
    scorer: str
    seat: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., mesh_epoch: _Optional[int] = ..., version: _Optional[int] = ..., heartbeat_age_s: _Optional[float] = ..., activity: _Optional[str] = ..., gauges: _Optional[_Mapping[str, float]] = ..., held_leases: _Optional[int] = ..., incarnation: _Optional[int] = ..., scorer: _Optional[str] = ..., seat: _Optional[str] = ...) -> None: ...

class HostStatus(_message.Message):
    __slots__ = ("host", "faults", "blocked")
    HOST_FIELD_NUMBER: _ClassVar[int]
    FAULTS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    host: str
    faults: int
    blocked: str
    def __init__(self, host: _Optional[str] = ..., faults: _Optional[int] = ..., blocked: _Optional[str] = ...) -> None: ...

class HostRequest(_message.Message):
    __slots__ = ("request_id", "host", "blocked")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    host: str
    blocked: bool
    def __init__(self, request_id: _Optional[str] = ..., host: _Optional[str] = ..., blocked: _Optional[bool] = ...) -> None: ...

class SeatStatus(_message.Message):
    __slots__ = ("role", "name", "holder", "asked", "since_s", "why", "members")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    holder: str
    asked: bool
    since_s: float
    why: str
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., holder: _Optional[str] = ..., asked: _Optional[bool] = ..., since_s: _Optional[float] = ..., why: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class ControllerStatus(_message.Message):
    __slots__ = ("controller_id", "address", "state", "pid", "host", "heartbeat_age_s", "rest")
    CONTROLLER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    REST_FIELD_NUMBER: _ClassVar[int]
    controller_id: str
    address: str
    state: str
    pid: int
    host: str
    heartbeat_age_s: float
    rest: str
    def __init__(self, controller_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., heartbeat_age_s: _Optional[float] = ..., rest: _Optional[str] = ...) -> None: ...

class TaskCounts(_message.Message):
    __slots__ = ("dispatched", "pending", "leased", "ready", "in_step", "trained", "dropped")
    class DroppedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    DISPATCHED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    IN_STEP_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    dispatched: int
    pending: int
    leased: int
    ready: int
    in_step: int
    trained: int
    dropped: _containers.ScalarMap[str, int]
    def __init__(self, dispatched: _Optional[int] = ..., pending: _Optional[int] = ..., leased: _Optional[int] = ..., ready: _Optional[int] = ..., in_step: _Optional[int] = ..., trained: _Optional[int] = ..., dropped: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("run_id", "run_name", "phase", "leader", "term", "step", "total_steps", "version", "mesh_epoch", "tasks", "workers", "controllers", "desired", "metrics", "failovers", "mesh_rebuilds", "reason", "checkpoint_step", "proposed", "proposed_why", "provider_trouble", "spares", "reward_trouble", "seats", "training_seats", "time_left_s", "changed", "hosts")
    class DesiredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ProposedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SparesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MESH_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    FAILOVERS_FIELD_NUMBER: _ClassVar[int]
    MESH_REBUILDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_WHY_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    REWARD_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SEATS_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_name: str
    phase: str
    leader: str
    term: int
    step: int
    total_steps: int
    version: int
    mesh_epoch: int
    tasks: TaskCounts
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    controllers: _containers.RepeatedCompositeFieldContainer[ControllerStatus]
    desired: _containers.ScalarMap[str, int]
    metrics: _containers.ScalarMap[str, float]
    failovers: int
    mesh_rebuilds: int
    reason: str
    checkpoint_step: int
    proposed: _containers.ScalarMap[str, int]
    proposed_why: str
    provider_trouble: str
    spares: _containers.ScalarMap[str, int]
    reward_trouble: str
    seats: _containers.RepeatedCompositeFieldContainer[SeatStatus]
    training_seats: int
    time_left_s: float
    changed: _containers.RepeatedCompositeFieldContainer[SettingChange]
    hosts: _containers.RepeatedCompositeFieldContainer[HostStatus]
    def __init__(self, run_id: _Optional[str] = ..., run_name: _Optional[str] = ..., phase: _Optional[str] = ..., leader: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., total_steps: _Optional[int] = ..., version: _Optional[int] = ..., mesh_epoch: _Optional[int] = ..., tasks: _Optional[_Union[TaskCounts, _Mapping]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., controllers: _Optional[_Iterable[_Union[ControllerStatus, _Mapping]]] = ..., desired: _Optional[_Mapping[str, int]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., failovers: _Optional[int] = ..., mesh_rebuilds: _Optional[int] = ..., reason: _Optional[str] = ..., checkpoint_step: _Optional[int] = ..., proposed: _Optional[_Mapping[str, int]] = ..., proposed_why: _Optional[str] = ..., provider_trouble: _Optional[str] = ..., spares: _Optional[_Mapping[str, int]] = ..., reward_trouble: _Optional[str] = ..., seats: _Optional[_Iterable[_Union[SeatStatus, _Mapping]]] = ..., training_seats: _Optional[int] = ..., time_left_s: _Optional[float] = ..., changed: _Optional[_Iterable[_Union[SettingChange, _Mapping]]] = ..., hosts: _Optional[_Iterable[_Union[HostStatus, _Mapping]]] = ...) -> None: ...

class SettingChange(_message.Message):
    __slots__ = ("name", "old", "new", "step")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OLD_FIELD_NUMBER: _ClassVar[int]
    NEW_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    name: str
    old: str
    new: str
    step: int
    def __init__(self, name: _Optional[str] = ..., old: _Optional[str] = ..., new: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class SettingsRequest(_message.Message):
    __slots__ = ("request_id", "settings", "dry_run")
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    settings: _containers.ScalarMap[str, str]
    dry_run: bool
    def __init__(self, request_id: _Optional[str] = ..., settings: _Optional[_Mapping[str, str]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class SettingsReply(_message.Message):
    __slots__ = ("message", "changes")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    message: str
    changes: _containers.RepeatedCompositeFieldContainer[SettingChange]
    def __init__(self, message: _Optional[str] = ..., changes: _Optional[_Iterable[_Union[SettingChange, _Mapping]]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("after", "wait_s")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    after: str
    wait_s: float
    def __init__(self, after: _Optional[str] = ..., wait_s: _Optional[float] = ...) -> None: ...

class EventsReply(_message.Message):
    __slots__ = ("position", "events")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    position: str
    events: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, position: _Optional[str] = ..., events: _Optional[_Iterable[str]] = ...) -> None: ...

class GroupsRequest(_message.Message):
    __slots__ = ("group_id", "limit", "step", "row", "sort", "grep")
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROW_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    GREP_FIELD_NUMBER: _ClassVar[int]
    group_id: str
    limit: int
    step: int
    row: int
    sort: str
    grep: str
    def __init__(self, group_id: _Optional[str] = ..., limit: _Optional[int] = ..., step: _Optional[int] = ..., row: _Optional[int] = ..., sort: _Optional[str] = ..., grep: _Optional[str] = ...) -> None: ...

class GroupsReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class ExitReport(_message.Message):
    __slots__ = ("worker_id", "incarnation", "pid", "host", "exit_code", "cause", "detail")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    pid: int
    host: str
    exit_code: int
    cause: str
    detail: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., exit_code: _Optional[int] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ExitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FaultReport(_message.Message):
    __slots__ = ("request_id", "name", "pid", "host", "cause", "detail")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    name: str
    pid: int
    host: str
    cause: str
    detail: str
    def __init__(self, request_id: _Optional[str] = ..., name: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., cause: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class FaultReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("request_id", "desired", "expected")
    class DesiredEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ExpectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    desired: _containers.ScalarMap[str, int]
    expected: _containers.ScalarMap[str, int]
    def __init__(self, request_id: _Optional[str] = ..., desired: _Optional[_Mapping[str, int]] = ..., expected: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("request_id", "worker_id", "replace", "incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    worker_id: str
    replace: bool
    incarnation: int
    def __init__(self, request_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., replace: _Optional[bool] = ..., incarnation: _Optional[int] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("request_id", "paused")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    paused: bool
    def __init__(self, request_id: _Optional[str] = ..., paused: _Optional[bool] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class SuspendRequest(_message.Message):
    __slots__ = ("request_id", "reason", "stage")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    stage: SuspendStage
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., stage: _Optional[_Union[SuspendStage, str]] = ...) -> None: ...

class ContinueRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AdminReply(_message.Message):
    __slots__ = ("message",)
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    message: str
    def __init__(self, message: _Optional[str] = ...) -> None: ...
