"""Protobuf encoding of the ledger's words and dataclasses."""

from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

from controller.ledger.enums import Role
from paceline.v1 import common_pb2

E = TypeVar("E", bound=Enum)
M = TypeVar("M", bound=Message)


def wire_values(words: type[E], wire: Any, prefix: str) -> dict[E, Any]:
    """Each member of an enum to the value of the same name in the protobuf enum ``wire``."""
    return {word: wire.Value(f"{prefix}_{word.name}") for word in words}


ROLES = wire_values(Role, common_pb2.Role, "ROLE")


def message_of(kind: type[M], view: Any, **other: Any) -> M:
    """The message with the fields of the dataclass ``view``; ``other``: those that differ."""
    classes: Any = kind, type(view)
    names = _shared_names(*classes)
    message: M = kind(**{n: getattr(view, n) for n in names if n not in other}, **other)
    return message


@cache
def _shared_names(kind: Any, view: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(view) if f.name in kind.DESCRIPTOR.fields_by_name)
