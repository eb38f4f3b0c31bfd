from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_POLICY: _ClassVar[Role]
    ROLE_ROLLOUT: _ClassVar[Role]
    ROLE_SCORER: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_POLICY: Role
ROLE_ROLLOUT: Role
ROLE_SCORER: Role

class Caller(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class TaskRef(_message.Message):
    __slots__ = ("task_id", "attempt")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    task_id: str
    attempt: int
    def __init__(self, task_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "length")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    version: int
    length: int
    def __init__(self, version: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Stat(_message.Message):
    __slots__ = ("sum", "weight", "max")
    SUM_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    sum: float
    weight: float
    max: float
    def __init__(self, sum: _Optional[float] = ..., weight: _Optional[float] = ..., max: _Optional[float] = ...) -> None: ...
