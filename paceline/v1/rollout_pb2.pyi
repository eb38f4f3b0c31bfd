from paceline.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TASK_KIND_TRAIN: _ClassVar[TaskKind]
    TASK_KIND_EVAL: _ClassVar[TaskKind]

class EmptyReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMPTY_REASON_UNSPECIFIED: _ClassVar[EmptyReason]
    EMPTY_REASON_STALENESS: _ClassVar[EmptyReason]
    EMPTY_REASON_WEIGHTS: _ClassVar[EmptyReason]
    EMPTY_REASON_PAUSED: _ClassVar[EmptyReason]
    EMPTY_REASON_STOPPED: _ClassVar[EmptyReason]
    EMPTY_REASON_ISOLATED: _ClassVar[EmptyReason]
    EMPTY_REASON_SPARE: _ClassVar[EmptyReason]
    EMPTY_REASON_PARKED: _ClassVar[EmptyReason]
    EMPTY_REASON_BLOCKED: _ClassVar[EmptyReason]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_ACCEPTED: _ClassVar[Verdict]
    VERDICT_DUPLICATE: _ClassVar[Verdict]
    VERDICT_SUPERSEDED: _ClassVar[Verdict]
    VERDICT_UNKNOWN_TASK: _ClassVar[Verdict]
    VERDICT_INVALID: _ClassVar[Verdict]
    VERDICT_TOO_STALE: _ClassVar[Verdict]

class ReturnKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RETURN_KIND_UNSPECIFIED: _ClassVar[ReturnKind]
    RETURN_KIND_HAND_BACK: _ClassVar[ReturnKind]
    RETURN_KIND_FAILED: _ClassVar[ReturnKind]
    RETURN_KIND_DROP: _ClassVar[ReturnKind]
TASK_KIND_UNSPECIFIED: TaskKind
TASK_KIND_TRAIN: TaskKind
TASK_KIND_EVAL: TaskKind
EMPTY_REASON_UNSPECIFIED: EmptyReason
EMPTY_REASON_STALENESS: EmptyReason
EMPTY_REASON_WEIGHTS: EmptyReason
EMPTY_REASON_PAUSED: EmptyReason
EMPTY_REASON_STOPPED: EmptyReason
EMPTY_REASON_ISOLATED: EmptyReason
EMPTY_REASON_SPARE: EmptyReason
EMPTY_REASON_PARKED: EmptyReason
EMPTY_REASON_BLOCKED: EmptyReason
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
VERDICT_UNSPECIFIED: Verdict
VERDICT_ACCEPTED: Verdict
VERDICT_DUPLICATE: Verdict
VERDICT_SUPERSEDED: Verdict
VERDICT_UNKNOWN_TASK: Verdict
VERDICT_INVALID: Verdict
VERDICT_TOO_STALE: Verdict
RETURN_KIND_UNSPECIFIED: ReturnKind
RETURN_KIND_HAND_BACK: ReturnKind
RETURN_KIND_FAILED: ReturnKind
RETURN_KIND_DROP: ReturnKind

class LeaseRequest(_message.Message):
    __slots__ = ("caller", "lease_seq", "max_tasks", "wait_s", "loaded_version")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    LEASE_SEQ_FIELD_NUMBER: _ClassVar[int]
    MAX_TASKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LOADED_VERSION_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    lease_seq: int
    max_tasks: int
    wait_s: float
    loaded_version: int
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., lease_seq: _Optional[int] = ..., max_tasks: _Optional[int] = ..., wait_s: _Optional[float] = ..., loaded_version: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("task", "kind", "epoch", "index", "row_json", "seed", "group_size", "oldest_fresh", "newest_fresh", "eval_set", "settings")
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ROW_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FRESH_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FRESH_FIELD_NUMBER: _ClassVar[int]
    EVAL_SET_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    task: _common_pb2.TaskRef
    kind: TaskKind
    epoch: int
    index: int
    row_json: str
    seed: int
    group_size: int
    oldest_fresh: int
    newest_fresh: int
    eval_set: str
    settings: TaskSettings
    def __init__(self, task: _Optional[_Union[_common_pb2.TaskRef, _Mapping]] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ..., row_json: _Optional[str] = ..., seed: _Optional[int] = ..., group_size: _Optional[int] = ..., oldest_fresh: _Optional[int] = ..., newest_fresh: _Optional[int] = ..., eval_set: _Optional[str] = ..., settings: _Optional[_Union[TaskSettings, _Mapping]] = ...) -> None: ...

class TaskSettings(_message.Message):
    __slots__ = ("max_tokens", "top_p", "top_k", "max_turns", "environment_timeout_s", "reward_timeout_s")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REWARD_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    top_p: float
    top_k: int
    max_turns: int
    environment_timeout_s: float
    reward_timeout_s: float
    def __init__(self, max_tokens: _Optional[int] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_turns: _Optional[int] = ..., environment_timeout_s: _Optional[float] = ..., reward_timeout_s: _Optional[float] = ...) -> None: ...

class PartialCompletion(_message.Message):
    __slots__ = ("tokens", "logprobs", "versions", "finish_reason", "stop")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    logprobs: bytes
    versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    finish_reason: FinishReason
    stop: str
    def __init__(self, tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[str] = ...) -> None: ...

class PartialGroup(_message.Message):
    __slots__ = ("task", "prompt_tokens", "completions")
    TASK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    task: _common_pb2.TaskRef
    prompt_tokens: bytes
    completions: _containers.RepeatedCompositeFieldContainer[PartialCompletion]
    def __init__(self, task: _Optional[_Union[_common_pb2.TaskRef, _Mapping]] = ..., prompt_tokens: _Optional[bytes] = ..., completions: _Optional[_Iterable[_Union[PartialCompletion, _Mapping]]] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("leases", "empty_reason")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    EMPTY_REASON_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    empty_reason: EmptyReason
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., empty_reason: _Optional[_Union[EmptyReason, str]] = ...) -> None: ...

class Completion(_message.Message):
    __slots__ = ("tokens", "logprobs", "versions", "finish_reason", "reward", "reward_components", "loss_mask", "text", "answer", "token_rewards", "columns", "routes", "branch")
    class RewardComponentsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    REWARD_COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    logprobs: bytes
    versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    finish_reason: FinishReason
    reward: float
    reward_components: _containers.ScalarMap[str, float]
    loss_mask: bytes
    text: str
    answer: str
    token_rewards: _containers.RepeatedCompositeFieldContainer[TokenReward]
    columns: _containers.ScalarMap[str, bytes]
    routes: bytes
    branch: Branch
    def __init__(self, tokens: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., versions: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., reward: _Optional[float] = ..., reward_components: _Optional[_Mapping[str, float]] = ..., loss_mask: _Optional[bytes] = ..., text: _Optional[str] = ..., answer: _Optional[str] = ..., token_rewards: _Optional[_Iterable[_Union[TokenReward, _Mapping]]] = ..., columns: _Optional[_Mapping[str, bytes]] = ..., routes: _Optional[bytes] = ..., branch: _Optional[_Union[Branch, _Mapping]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("of", "prefix")
    OF_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    of: int
    prefix: int
    def __init__(self, of: _Optional[int] = ..., prefix: _Optional[int] = ...) -> None: ...

class TokenReward(_message.Message):
    __slots__ = ("token", "reward")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    token: int
    reward: float
    def __init__(self, token: _Optional[int] = ..., reward: _Optional[float] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("task", "kind", "prompt_tokens", "completions", "generate_s", "reward_s", "prompt_text", "prompt_cut", "prompt_routes", "routes_width")
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    REWARD_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ROUTES_FIELD_NUMBER: _ClassVar[int]
    ROUTES_WIDTH_FIELD_NUMBER: _ClassVar[int]
    task: _common_pb2.TaskRef
    kind: TaskKind
    prompt_tokens: bytes
    completions: _containers.RepeatedCompositeFieldContainer[Completion]
    generate_s: float
    reward_s: float
    prompt_text: str
    prompt_cut: int
    prompt_routes: bytes
    routes_width: int
    def __init__(self, task: _Optional[_Union[_common_pb2.TaskRef, _Mapping]] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., prompt_tokens: _Optional[bytes] = ..., completions: _Optional[_Iterable[_Union[Completion, _Mapping]]] = ..., generate_s: _Optional[float] = ..., reward_s: _Optional[float] = ..., prompt_text: _Optional[str] = ..., prompt_cut: _Optional[int] = ..., prompt_routes: _Optional[bytes] = ..., routes_width: _Optional[int] = ...) -> None: ...

class GroupMeta(_message.Message):
    __slots__ = ("task", "kind", "digest", "prompt_tokens", "prompt_cut", "generate_s", "reward_s", "min_version", "max_version", "token_versions", "sequence_versions", "lengths", "rewards", "answers", "truncated", "branches", "prefixes")
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_CUT_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    REWARD_S_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    task: _common_pb2.TaskRef
    kind: TaskKind
    digest: str
    prompt_tokens: int
    prompt_cut: int
    generate_s: float
    reward_s: float
    min_version: int
    max_version: int
    token_versions: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    sequence_versions: _containers.RepeatedCompositeFieldContainer[SequenceVersions]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    answers: _containers.RepeatedScalarFieldContainer[str]
    truncated: int
    branches: _containers.RepeatedScalarFieldContainer[int]
    prefixes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, task: _Optional[_Union[_common_pb2.TaskRef, _Mapping]] = ..., kind: _Optional[_Union[TaskKind, str]] = ..., digest: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., prompt_cut: _Optional[int] = ..., generate_s: _Optional[float] = ..., reward_s: _Optional[float] = ..., min_version: _Optional[int] = ..., max_version: _Optional[int] = ..., token_versions: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ..., sequence_versions: _Optional[_Iterable[_Union[SequenceVersions, _Mapping]]] = ..., lengths: _Optional[_Iterable[int]] = ..., rewards: _Optional[_Iterable[float]] = ..., answers: _Optional[_Iterable[str]] = ..., truncated: _Optional[int] = ..., branches: _Optional[_Iterable[int]] = ..., prefixes: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceVersions(_message.Message):
    __slots__ = ("versions", "sequences")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    sequences: int
    def __init__(self, versions: _Optional[_Iterable[int]] = ..., sequences: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("caller", "groups")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    groups: _containers.RepeatedCompositeFieldContainer[GroupMeta]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupMeta, _Mapping]]] = ...) -> None: ...

class SubmitResult(_message.Message):
    __slots__ = ("task", "verdict", "message")
    TASK_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    task: _common_pb2.TaskRef
    verdict: Verdict
    message: str
    def __init__(self, task: _Optional[_Union[_common_pb2.TaskRef, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., message: _Optional[str] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SubmitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SubmitResult, _Mapping]]] = ...) -> None: ...

class ReturnedTask(_message.Message):
    __slots__ = ("task", "kind", "reason", "detail")
    TASK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    task: _common_pb2.TaskRef
    kind: ReturnKind
    reason: str
    detail: str
    def __init__(self, task: _Optional[_Union[_common_pb2.TaskRef, _Mapping]] = ..., kind: _Optional[_Union[ReturnKind, str]] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ReturnRequest(_message.Message):
    __slots__ = ("caller", "tasks")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    caller: _common_pb2.Caller
    tasks: _containers.RepeatedCompositeFieldContainer[ReturnedTask]
    def __init__(self, caller: _Optional[_Union[_common_pb2.Caller, _Mapping]] = ..., tasks: _Optional[_Iterable[_Union[ReturnedTask, _Mapping]]] = ...) -> None: ...

class ReturnReply(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SubmitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[SubmitResult, _Mapping]]] = ...) -> None: ...
