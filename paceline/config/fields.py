"""Field types of the configuration, and the base class of its sections."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0)]
Workload = Annotated[str, Field(pattern=r"^(statefulset|deployment)/[a-z0-9][a-z0-9.-]{0,252}$")]


def _home_expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path == "~" or path.startswith("~/") else path


LocalPath = Annotated[str, AfterValidator(_home_expanded)]
"""A leading `~` is expanded here, once: some of the libraries that receive paths do not expand it.
"""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _none(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML has no null: `"none"` unsets a field that may be unset."""
        optional = NoneType in get_args(cls.model_fields[str(info.field_name)].annotation)
        return None if value == "none" and optional else value


def meaning(field: FieldInfo) -> str:
    """The field's text as one line; empty if it has none."""
    return " ".join((field.description or "").split())


def table_of(field: FieldInfo) -> type[Section] | None:
    """The section that each value of a field of tables is; None for other fields."""
    for inner in get_args(field.annotation):
        if isinstance(inner, type) and issubclass(inner, Section):
            return inner
    return None
