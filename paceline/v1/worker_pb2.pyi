from paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WaitKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_KIND_UNSPECIFIED: _ClassVar[WaitKind]
    WAIT_KIND_HUB: _ClassVar[WaitKind]
    WAIT_KIND_MODEL: _ClassVar[WaitKind]
    WAIT_KIND_CONTROLLER: _ClassVar[WaitKind]
    WAIT_KIND_MESH: _ClassVar[WaitKind]
    WAIT_KIND_PEERS: _ClassVar[WaitKind]
    WAIT_KIND_COLLECTIVE: _ClassVar[WaitKind]
    WAIT_KIND_STATE: _ClassVar[WaitKind]
    WAIT_KIND_CHECKPOINT: _ClassVar[WaitKind]
    WAIT_KIND_GROUPS: _ClassVar[WaitKind]
    WAIT_KIND_PAYLOADS: _ClassVar[WaitKind]
    WAIT_KIND_VOTES: _ClassVar[WaitKind]
    WAIT_KIND_TASKS: _ClassVar[WaitKind]
    WAIT_KIND_WEIGHTS: _ClassVar[WaitKind]
    WAIT_KIND_ENGINE: _ClassVar[WaitKind]
    WAIT_KIND_REWARD: _ClassVar[WaitKind]
    WAIT_KIND_ENVIRONMENT: _ClassVar[WaitKind]
    WAIT_KIND_VERDICT: _ClassVar[WaitKind]
    WAIT_KIND_DATASET: _ClassVar[WaitKind]
    WAIT_KIND_STORE: _ClassVar[WaitKind]
    WAIT_KIND_RANK: _ClassVar[WaitKind]
    WAIT_KIND_SCORER: _ClassVar[WaitKind]

class Lifecycle(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LIFECYCLE_UNSPECIFIED: _ClassVar[Lifecycle]
    LIFECYCLE_STARTING: _ClassVar[Lifecycle]
    LIFECYCLE_RUNNING: _ClassVar[Lifecycle]
    LIFECYCLE_DRAINING: _ClassVar[Lifecycle]
    LIFECYCLE_STOPPED: _ClassVar[Lifecycle]
    LIFECYCLE_REJOIN: _ClassVar[Lifecycle]
WAIT_KIND_UNSPECIFIED: WaitKind
WAIT_KIND_HUB: WaitKind
WAIT_KIND_MODEL: WaitKind
WAIT_KIND_CONTROLLER: WaitKind
WAIT_KIND_MESH: WaitKind
WAIT_KIND_PEERS: WaitKind
WAIT_KIND_COLLECTIVE: WaitKind
WAIT_KIND_STATE: WaitKind
WAIT_KIND_CHECKPOINT: WaitKind
WAIT_KIND_GROUPS: WaitKind
WAIT_KIND_PAYLOADS: WaitKind
WAIT_KIND_VOTES: WaitKind
WAIT_KIND_TASKS: WaitKind
WAIT_KIND_WEIGHTS: WaitKind
WAIT_KIND_ENGINE: WaitKind
WAIT_KIND_REWARD: WaitKind
WAIT_KIND_ENVIRONMENT: WaitKind
WAIT_KIND_VERDICT: WaitKind
WAIT_KIND_DATASET: WaitKind
WAIT_KIND_STORE: WaitKind
WAIT_KIND_RANK: WaitKind
WAIT_KIND_SCORER: WaitKind
LIFECYCLE_UNSPECIFIED: Lifecycle
LIFECYCLE_STARTING: Lifecycle
LIFECYCLE_RUNNING: Lifecycle
LIFECYCLE_DRAINING: Lifecycle
LIFECYCLE_STOPPED: Lifecycle
LIFECYCLE_REJOIN: Lifecycle

class RegisterRequest(_message.Message):
    __slots__ = ("caller", "role", "host", "pid", "config_digest", "config_json", "state_version", "ranks", "tensor_host", "scorer", "address", "cgroup", "memory_kills", "release", "origins", "seat")
    class OriginsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    STATE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_HOST_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CGROUP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KILLS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    role: _common_pb2.Role
    host: str
    pid: int
    config_digest: str
    config_json: str
    state_version: int
    ranks: int
    tensor_host: str
    scorer: str
    address: str
    cgroup: str
    memory_kills: int
    release: str
    origins: _containers.ScalarMap[str, str]
    seat: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., role: _Optional[_Union[_common_pb2.Role, str]] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., config_digest: _Optional[str] = ..., config_json: _Optional[str] = ..., state_version: _Optional[int] = ..., ranks: _Optional[int] = ..., tensor_host: _Optional[str] = ..., scorer: _Optional[str] = ..., address: _Optional[str] = ..., cgroup: _Optional[str] = ..., memory_kills: _Optional[int] = ..., release: _Optional[str] = ..., origins: _Optional[_Mapping[str, str]] = ..., seat: _Optional[str] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("run_id", "rendezvous_url", "version", "heartbeat_s", "lease_ttl_s", "run_dir", "payload_urls")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_URL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_S_FIELD_NUMBER: _ClassVar[int]
    RUN_DIR_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_URLS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    rendezvous_url: str
    version: int
    heartbeat_s: float
    lease_ttl_s: float
    run_dir: str
    payload_urls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run_id: _Optional[str] = ..., rendezvous_url: _Optional[str] = ..., version: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., lease_ttl_s: _Optional[float] = ..., run_dir: _Optional[str] = ..., payload_urls: _Optional[_Iterable[str]] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("caller", "seq", "lifecycle", "progress", "busy", "held_leases", "mesh_epoch", "state_version", "loaded_version", "link_epochs", "gauges", "activity", "waits", "parity_failures", "parity_detail", "load_failures", "load_detail", "seen_term", "seat", "stored_weights")
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LIFECYCLE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    MESH_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_VERSION_FIELD_NUMBER: _ClassVar[int]
    LOADED_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINK_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    PARITY_FAILURES_FIELD_NUMBER: _ClassVar[int]
    PARITY_DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOAD_DETAIL_FIELD_NUMBER: _ClassVar[int]
    SEEN_TERM_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    STORED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    seq: int
    lifecycle: Lifecycle
    progress: int
    busy: bool
    held_leases: _containers.RepeatedCompositeFieldContainer[_common_pb2.TaskRef]
    mesh_epoch: int
    state_version: int
    loaded_version: int
    link_epochs: _containers.RepeatedScalarFieldContainer[int]
    gauges: _containers.ScalarMap[str, float]
    activity: str
    waits: _containers.RepeatedCompositeFieldContainer[Wait]
    parity_failures: int
    parity_detail: str
    load_failures: int
    load_detail: str
    seen_term: int
    seat: SeatReport
    stored_weights: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., seq: _Optional[int] = ..., lifecycle: _Optional[_Union[Lifecycle, str]] = ..., progress: _Optional[int] = ..., busy: _Optional[bool] = ..., held_leases: _Optional[_Iterable[_Union[_common_pb2.TaskRef, _Mapping]]] = ..., mesh_epoch: _Optional[int] = ..., state_version: _Optional[int] = ..., loaded_version: _Optional[int] = ..., link_epochs: _Optional[_Iterable[int]] = ..., gauges: _Optional[_Mapping[str, float]] = ..., activity: _Optional[str] = ..., waits: _Optional[_Iterable[_Union[Wait, _Mapping]]] = ..., parity_failures: _Optional[int] = ..., parity_detail: _Optional[str] = ..., load_failures: _Optional[int] = ..., load_detail: _Optional[str] = ..., seen_term: _Optional[int] = ..., seat: _Optional[_Union[SeatReport, _Mapping]] = ..., stored_weights: _Optional[str] = ...) -> None: ...

class SeatReport(_message.Message):
    __slots__ = ("grant", "parked")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    grant: int
    parked: bool
    def __init__(self, grant: _Optional[int] = ..., parked: _Optional[bool] = ...) -> None: ...

class Wait(_message.Message):
    __slots__ = ("kind", "what", "of", "age_s", "limit_s", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: WaitKind
    what: str
    of: str
    age_s: float
    limit_s: float
    count: int
    def __init__(self, kind: _Optional[_Union[WaitKind, str]] = ..., what: _Optional[str] = ..., of: _Optional[str] = ..., age_s: _Optional[float] = ..., limit_s: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("term", "seq", "lifecycle", "mesh", "links", "version", "cancelled", "paused", "checkpoint_step", "leave_step", "scorers", "seat", "redis_port", "stored_weights")
    TERM_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LIFECYCLE_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    LEAVE_STEP_FIELD_NUMBER: _ClassVar[int]
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    REDIS_PORT_FIELD_NUMBER: _ClassVar[int]
    STORED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    term: int
    seq: int
    lifecycle: Lifecycle
    mesh: PolicyMesh
    links: _containers.RepeatedCompositeFieldContainer[WeightsLink]
    version: int
    cancelled: _containers.RepeatedCompositeFieldContainer[_common_pb2.TaskRef]
    paused: bool
    checkpoint_step: int
    leave_step: bool
    scorers: _containers.RepeatedCompositeFieldContainer[Scorer]
    seat: Seat
    redis_port: int
    stored_weights: str
    def __init__(self, term: _Optional[int] = ..., seq: _Optional[int] = ..., lifecycle: _Optional[_Union[Lifecycle, str]] = ..., mesh: _Optional[_Union[PolicyMesh, _Mapping]] = ..., links: _Optional[_Iterable[_Union[WeightsLink, _Mapping]]] = ..., version: _Optional[int] = ..., cancelled: _Optional[_Iterable[_Union[_common_pb2.TaskRef, _Mapping]]] = ..., paused: _Optional[bool] = ..., checkpoint_step: _Optional[int] = ..., leave_step: _Optional[bool] = ..., scorers: _Optional[_Iterable[_Union[Scorer, _Mapping]]] = ..., seat: _Optional[_Union[Seat, _Mapping]] = ..., redis_port: _Optional[int] = ..., stored_weights: _Optional[str] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("name", "grant", "hold")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    name: str
    grant: int
    hold: bool
    def __init__(self, name: _Optional[str] = ..., grant: _Optional[int] = ..., hold: _Optional[bool] = ...) -> None: ...

class Scorer(_message.Message):
    __slots__ = ("name", "worker_id", "address")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    name: str
    worker_id: str
    address: str
    def __init__(self, name: _Optional[str] = ..., worker_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class PolicyMesh(_message.Message):
    __slots__ = ("epoch", "members", "state_version", "step", "source_rank", "restore", "checkpoint_path")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STATE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PATH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    members: _containers.RepeatedCompositeFieldContainer[MeshMember]
    state_version: int
    step: int
    source_rank: int
    restore: bool
    checkpoint_path: str
    def __init__(self, epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[MeshMember, _Mapping]]] = ..., state_version: _Optional[int] = ..., step: _Optional[int] = ..., source_rank: _Optional[int] = ..., restore: _Optional[bool] = ..., checkpoint_path: _Optional[str] = ...) -> None: ...

class MeshMember(_message.Message):
    __slots__ = ("worker_id", "incarnation", "tensor_host", "needs_state")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_HOST_FIELD_NUMBER: _ClassVar[int]
    NEEDS_STATE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    tensor_host: str
    needs_state: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., tensor_host: _Optional[str] = ..., needs_state: _Optional[bool] = ...) -> None: ...

class WeightsLink(_message.Message):
    __slots__ = ("epoch", "publisher", "receiver", "reload", "tree", "relayed")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PUBLISHER_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    RELOAD_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    publisher: MeshMember
    receiver: MeshMember
    reload: bool
    tree: int
    relayed: bool
    def __init__(self, epoch: _Optional[int] = ..., publisher: _Optional[_Union[MeshMember, _Mapping]] = ..., receiver: _Optional[_Union[MeshMember, _Mapping]] = ..., reload: _Optional[bool] = ..., tree: _Optional[int] = ..., relayed: _Optional[bool] = ...) -> None: ...

class PeerError(_message.Message):
    __slots__ = ("caller", "epoch", "is_link", "detail")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_LINK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    epoch: int
    is_link: bool
    detail: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., epoch: _Optional[int] = ..., is_link: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class PeerErrorReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
