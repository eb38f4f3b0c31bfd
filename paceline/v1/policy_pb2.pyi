from paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLAN_STATE_UNSPECIFIED: _ClassVar[PlanState]
    PLAN_STATE_OPEN: _ClassVar[PlanState]
    PLAN_STATE_WAIT: _ClassVar[PlanState]
    PLAN_STATE_EPOCH_OVER: _ClassVar[PlanState]
    PLAN_STATE_FINISHED: _ClassVar[PlanState]
    PLAN_STATE_EVALUATE: _ClassVar[PlanState]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_COMMITTED: _ClassVar[Outcome]
    OUTCOME_RETRY: _ClassVar[Outcome]
    OUTCOME_PENDING: _ClassVar[Outcome]

class GroupFault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_FAULT_UNSPECIFIED: _ClassVar[GroupFault]
    GROUP_FAULT_PAYLOAD_LOST: _ClassVar[GroupFault]
    GROUP_FAULT_PAYLOAD_INVALID: _ClassVar[GroupFault]
    GROUP_FAULT_OUT_OF_MEMORY: _ClassVar[GroupFault]
    GROUP_FAULT_KILLED_TRAINERS: _ClassVar[GroupFault]
PLAN_STATE_UNSPECIFIED: PlanState
PLAN_STATE_OPEN: PlanState
PLAN_STATE_WAIT: PlanState
PLAN_STATE_EPOCH_OVER: PlanState
PLAN_STATE_FINISHED: PlanState
PLAN_STATE_EVALUATE: PlanState
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_COMMITTED: Outcome
OUTCOME_RETRY: Outcome
OUTCOME_PENDING: Outcome
GROUP_FAULT_UNSPECIFIED: GroupFault
GROUP_FAULT_PAYLOAD_LOST: GroupFault
GROUP_FAULT_PAYLOAD_INVALID: GroupFault
GROUP_FAULT_OUT_OF_MEMORY: GroupFault
GROUP_FAULT_KILLED_TRAINERS: GroupFault

class PlanRequest(_message.Message):
    __slots__ = ("caller", "mesh_epoch", "state_version", "wait_s")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    MESH_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    mesh_epoch: int
    state_version: int
    wait_s: float
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., mesh_epoch: _Optional[int] = ..., state_version: _Optional[int] = ..., wait_s: _Optional[float] = ...) -> None: ...

class StepPlan(_message.Message):
    __slots__ = ("step", "mesh_epoch", "version", "next_version", "shard", "total_tokens", "total_sequences", "total_groups", "rank", "size", "version_epochs", "oldest_step", "groups", "total_samples", "reward_sum", "reward_squares", "within_squares", "lr", "checkpoint", "term")
    STEP_FIELD_NUMBER: _ClassVar[int]
    MESH_EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NEXT_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_GROUPS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    VERSION_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REWARD_SUM_FIELD_NUMBER: _ClassVar[int]
    REWARD_SQUARES_FIELD_NUMBER: _ClassVar[int]
    WITHIN_SQUARES_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    step: int
    mesh_epoch: int
    version: int
    next_version: int
    shard: _containers.RepeatedCompositeFieldContainer[_common_pb2.TaskRef]
    total_tokens: int
    total_sequences: int
    total_groups: int
    rank: int
    size: int
    version_epochs: _containers.RepeatedCompositeFieldContainer[VersionEpoch]
    oldest_step: int
    groups: _containers.RepeatedCompositeFieldContainer[PlannedGroup]
    total_samples: int
    reward_sum: float
    reward_squares: float
    within_squares: float
    lr: float
    checkpoint: bool
    term: int
    def __init__(self, step: _Optional[int] = ..., mesh_epoch: _Optional[int] = ..., version: _Optional[int] = ..., next_version: _Optional[int] = ..., shard: _Optional[_Iterable[_Union[_common_pb2.TaskRef, _Mapping]]] = ..., total_tokens: _Optional[int] = ..., total_sequences: _Optional[int] = ..., total_groups: _Optional[int] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., version_epochs: _Optional[_Iterable[_Union[VersionEpoch, _Mapping]]] = ..., oldest_step: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[PlannedGroup, _Mapping]]] = ..., total_samples: _Optional[int] = ..., reward_sum: _Optional[float] = ..., reward_squares: _Optional[float] = ..., within_squares: _Optional[float] = ..., lr: _Optional[float] = ..., checkpoint: _Optional[bool] = ..., term: _Optional[int] = ...) -> None: ...

class PlannedGroup(_message.Message):
    __slots__ = ("tokens", "sequences", "suspect", "digest", "prompt_tokens", "lengths", "branches", "prefixes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    sequences: int
    suspect: bool
    digest: str
    prompt_tokens: int
    lengths: _containers.RepeatedScalarFieldContainer[int]
    branches: _containers.RepeatedScalarFieldContainer[int]
    prefixes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., suspect: _Optional[bool] = ..., digest: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., lengths: _Optional[_Iterable[int]] = ..., branches: _Optional[_Iterable[int]] = ..., prefixes: _Optional[_Iterable[int]] = ...) -> None: ...

class VersionEpoch(_message.Message):
    __slots__ = ("first_version", "offset")
    FIRST_VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    first_version: int
    offset: int
    def __init__(self, first_version: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class PlanReply(_message.Message):
    __slots__ = ("state", "plan", "evaluate_step")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_STEP_FIELD_NUMBER: _ClassVar[int]
    state: PlanState
    plan: StepPlan
    evaluate_step: int
    def __init__(self, state: _Optional[_Union[PlanState, str]] = ..., plan: _Optional[_Union[StepPlan, _Mapping]] = ..., evaluate_step: _Optional[int] = ...) -> None: ...

class HeldOutRequest(_message.Message):
    __slots__ = ("caller", "first")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    first: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., first: _Optional[int] = ...) -> None: ...

class HeldOutReply(_message.Message):
    __slots__ = ("rows", "total")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[str]
    total: int
    def __init__(self, rows: _Optional[_Iterable[str]] = ..., total: _Optional[int] = ...) -> None: ...

class HeldOutMeasured(_message.Message):
    __slots__ = ("caller", "step", "version", "stats", "rows", "left_out")
    class StatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Stat
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Stat, _Mapping]] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    step: int
    version: int
    stats: _containers.MessageMap[str, _common_pb2.Stat]
    rows: int
    left_out: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., stats: _Optional[_Mapping[str, _common_pb2.Stat]] = ..., rows: _Optional[int] = ..., left_out: _Optional[int] = ...) -> None: ...

class HeldOutRecorded(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VoteRequest(_message.Message):
    __slots__ = ("caller", "step", "mesh_epoch", "weights_digest", "stats", "wait_s", "term")
    class StatsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Stat
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Stat, _Mapping]] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MESH_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    step: int
    mesh_epoch: int
    weights_digest: str
    stats: _containers.MessageMap[str, _common_pb2.Stat]
    wait_s: float
    term: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., step: _Optional[int] = ..., mesh_epoch: _Optional[int] = ..., weights_digest: _Optional[str] = ..., stats: _Optional[_Mapping[str, _common_pb2.Stat]] = ..., wait_s: _Optional[float] = ..., term: _Optional[int] = ...) -> None: ...

class VoteReply(_message.Message):
    __slots__ = ("outcome", "version")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    outcome: Outcome
    version: int
    def __init__(self, outcome: _Optional[_Union[Outcome, str]] = ..., version: _Optional[int] = ...) -> None: ...

class RejectRequest(_message.Message):
    __slots__ = ("caller", "step", "groups", "fault", "detail")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    step: int
    groups: _containers.RepeatedCompositeFieldContainer[_common_pb2.TaskRef]
    fault: GroupFault
    detail: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., step: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[_common_pb2.TaskRef, _Mapping]]] = ..., fault: _Optional[_Union[GroupFault, str]] = ..., detail: _Optional[str] = ...) -> None: ...

class RejectReply(_message.Message):
    __slots__ = ("left",)
    LEFT_FIELD_NUMBER: _ClassVar[int]
    left: int
    def __init__(self, left: _Optional[int] = ...) -> None: ...

class TryRequest(_message.Message):
    __slots__ = ("caller", "step", "mesh_epoch", "task_id")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MESH_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    step: int
    mesh_epoch: int
    task_id: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., step: _Optional[int] = ..., mesh_epoch: _Optional[int] = ..., task_id: _Optional[str] = ...) -> None: ...

class TryReply(_message.Message):
    __slots__ = ("stands",)
    STANDS_FIELD_NUMBER: _ClassVar[int]
    stands: bool
    def __init__(self, stands: _Optional[bool] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("caller", "step", "version", "path", "size_bytes", "seconds", "weights_digest")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    step: int
    version: int
    path: str
    size_bytes: int
    seconds: float
    weights_digest: str
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., step: _Optional[int] = ..., version: _Optional[int] = ..., path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., weights_digest: _Optional[str] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("obsolete_paths", "settled_step", "recorded_names")
    OBSOLETE_PATHS_FIELD_NUMBER: _ClassVar[int]
    SETTLED_STEP_FIELD_NUMBER: _ClassVar[int]
    RECORDED_NAMES_FIELD_NUMBER: _ClassVar[int]
    obsolete_paths: _containers.RepeatedScalarFieldContainer[str]
    settled_step: int
    recorded_names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, obsolete_paths: _Optional[_Iterable[str]] = ..., settled_step: _Optional[int] = ..., recorded_names: _Optional[_Iterable[str]] = ...) -> None: ...
