from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("run", "scorer", "prompt_tokens", "prompt", "answer_json", "completions")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_JSON_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    run: str
    scorer: str
    prompt_tokens: bytes
    prompt: str
    answer_json: str
    completions: _containers.RepeatedCompositeFieldContainer[ScoredCompletion]
    def __init__(self, run: _Optional[str] = ..., scorer: _Optional[str] = ..., prompt_tokens: _Optional[bytes] = ..., prompt: _Optional[str] = ..., answer_json: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[ScoredCompletion, _Mapping]]] = ...) -> None: ...

class ScoredCompletion(_message.Message):
    __slots__ = ("tokens", "text")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    text: str
    def __init__(self, tokens: _Optional[bytes] = ..., text: _Optional[str] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("scores", "columns")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedScalarFieldContainer[float]
    columns: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, scores: _Optional[_Iterable[float]] = ..., columns: _Optional[_Iterable[bytes]] = ...) -> None: ...
