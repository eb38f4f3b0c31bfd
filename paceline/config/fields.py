"""Field types of the configuration, rules of change, and the base class of its sections."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic.fields import FieldInfo

CARRIED = 1 << 31  # What every message can carry is below it
Positive = Annotated[int, Field(ge=1, lt=CARRIED)]
NonNegative = Annotated[int, Field(ge=0, lt=CARRIED)]
Seconds = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0)]
Workload = Annotated[str, Field(pattern=r"^(statefulset|deployment)/[a-z0-9][a-z0-9.-]{0,252}$")]


def _home_expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path == "~" or path.startswith("~/") else path


LocalPath = Annotated[str, AfterValidator(_home_expanded)]
"""Some of the libraries that receive paths do not expand `~`."""


@dataclass(frozen=True, slots=True)
class Live:
    """A run may change the setting, also while it runs. Its value travels with the plan of a step
    or the lease of a task, so that a replay uses it again."""

    at: Literal["step", "lease"]


@dataclass(frozen=True, slots=True)
class AtStart:
    """A run may change the setting when it is continued: processes read it at their start."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A run never changes the setting, for this reason."""

    reason: str


Change = Live | AtStart | Fixed


AT_START = AtStart()
STEP, LEASE = Live("step"), Live("lease")
OBJECTIVE = "steps that a rollback repeats must optimise what they optimised before"


AS_TOML = "TOML"
"""Context of a dump as TOML, which has no null: a field without a value is left out if that is its
default, and "none" otherwise."""


class RowForm(StrEnum):
    """Content of a row of recorded data."""

    CHAT = "chat"  # whole conversations: the assistant's turns are trained
    COMPLETION = "completion"  # a prompt and its completion
    PAIR = "pair"  # the better and the worse one of two completions
    LABELLED = "labelled"  # a prompt, a completion, and whether it is good

    @property
    def completions(self) -> int:
        return 2 if self is RowForm.PAIR else 1


class Section(BaseModel):
    """Settings; a field may have another rule than ``change``: ``Annotated[int, Live("step")]``."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
    change: ClassVar[Change] = AT_START

    @classmethod
    def change_of(cls, name: str) -> Change:
        info = cls.model_fields.get(name)
        marks = [mark for mark in info.metadata if isinstance(mark, Change)] if info else []
        return marks[0] if marks else cls.change

    @field_validator("*", mode="before")
    @classmethod
    def _none(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML has no null: `"none"` unsets a field that may be unset."""
        optional = NoneType in get_args(cls.model_fields[str(info.field_name)].annotation)
        return None if value == "none" and optional else value

    @model_serializer(mode="wrap")
    def _written(
        self, write: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        values: dict[str, Any] = write(self)
        if info.context != AS_TOML:
            return values
        unset = {
            name: "none"
            for name, field in type(self).model_fields.items()
            if getattr(self, name) is None and field.default is not None
        }
        return {name: value for name, value in (values | unset).items() if value is not None}


def meaning(field: FieldInfo) -> str:
    """The field's text as one line; empty if it has none."""
    return " ".join((field.description or "").split())


def table_of(field: FieldInfo) -> type[Section] | None:
    """The section that each value of a field of tables is; None for other fields."""
    for inner in get_args(field.annotation):
        if isinstance(inner, type) and issubclass(inner, Section):
            return inner
    return None


def section_of(field: FieldInfo) -> type[Section] | None:
    """The section that a field is, also one that may be left out; None for other fields."""
    inner = get_args(field.annotation)
    for kind in inner if NoneType in inner else (field.annotation,):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None
