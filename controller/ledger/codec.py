"""JSON encoding of dataclasses, derived from the types of their fields.

``codec_of`` compiles two functions for a type; None means that a value is JSON already, or needs no
decoding. ``encode`` and ``decode`` apply them to a whole dataclass.

    int, float, str, None, StrEnum    as they are
    tuple, list                       array (a tuple of the above stays a tuple)
    mapping with string keys          object, in order
    any other mapping                 array of [key, value]
    bytearray                         text: base64 of the compressed bytes
    dataclass                         object by field name; an array if the class sets ``compact``

A field with ``metadata=TRANSIENT`` is left out, and has its default when it is read. So has a field
that is missing, and the last items of an array. A field without a default that is missing is a
KeyError.
"""

import base64
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Convert = Callable[[Any], Any]
_T = TypeVar("_T")

TRANSIENT = {"transient": True}


def encode(value: Any) -> dict[str, Any]:
    """``value``, a dataclass, as JSON-able values that share nothing with it that changes later."""
    kind: Any = type(value)
    encoded: dict[str, Any] = _apply(codec_of(kind)[0], value)
    return encoded


def decode(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """Inverse of ``encode``. Raises KeyError for a missing field that has no default."""
    made: Any = kind
    decoded: _T = _apply(codec_of(made)[1], data)
    return decoded


@cache
def codec_of(kind: Any) -> tuple[Any, Any]:
    """The functions that encode and decode values of ``kind``; see above."""
    kind = _bare(kind)
    origin, args = get_origin(kind) or kind, get_args(kind)
    if kind is bytearray:
        return (
            lambda v: base64.b64encode(zlib.compress(v, 1)).decode(),
            lambda v: bytearray(zlib.decompress(base64.b64decode(v))),
        )
    if is_dataclass(kind):
        return _fields_encoder(kind), _fields_decoder(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return None, kind
    if origin in (Union, UnionType):
        (present,) = (arg for arg in args if arg is not NoneType)
        to, back = codec_of(present)
        return (
            to and (lambda v: None if v is None else to(v)),
            back and (lambda v: None if v is None else back(v)),
        )
    if origin in (tuple, list):
        items = [codec_of(arg) for arg in args if arg is not Ellipsis]
        if len(items) > 1:
            return (
                lambda v: [_apply(f, x) for (f, _), x in zip(items, v, strict=True)],
                lambda v: origin(_apply(f, x) for (_, f), x in zip(items, v, strict=True)),
            )
        ((to, back),) = items
        # A tuple cannot change: JSON writes it as it is. A snapshot has a million of task ids in
        # tuples.
        same = list if origin is list else None
        return (
            same if to is None else lambda v: [to(x) for x in v],
            origin if back is None else lambda v: origin(back(x) for x in v),
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        made: Any = Counter if origin is Counter else dict
        to, back = codec_of(int if origin is Counter else args[1])
        if not issubclass(_bare(args[0]), str):
            return (
                lambda v: [[k, _apply(to, x)] for k, x in v.items()],
                lambda v: {k: _apply(back, x) for k, x in v},
            )
        return (
            dict if to is None else lambda v: {k: to(x) for k, x in v.items()},
            made if back is None else lambda v: {k: back(x) for k, x in v.items()},
        )
    return None, None


def _fields_encoder(kind: Any) -> Convert:
    """Most fields are JSON already: all are read in one call, and the others replaced."""
    plan = [(name, codec_of(hint)[0]) for name, hint in _fields(kind)]
    names = [name for name, _ in plan]
    # With one name it would return the value by itself.
    read: Convert = (
        attrgetter(*names) if len(names) > 1 else lambda v: [getattr(v, n) for n in names]
    )
    others = [(place, f) for place, (_, f) in enumerate(plan) if f is not None]

    def array(value: Any) -> list[Any]:
        made = list(read(value))
        for place, convert in others:
            made[place] = convert(made[place])
        return made

    if getattr(kind, "compact", False):
        return array
    return lambda value: dict(zip(names, array(value), strict=True))


def _fields_decoder(kind: Any) -> Convert:
    plan = [(name, codec_of(hint)[1]) for name, hint in _fields(kind)]
    if getattr(kind, "compact", False):
        converts = [f for _, f in plan]
        return lambda v: kind(*[_apply(f, x) for f, x in zip(converts, v, strict=False)])
    optional = {
        f.name for f in fields(kind) if (f.default, f.default_factory) != (MISSING, MISSING)
    }
    parts = [(name, f, name in optional) for name, f in plan]
    return lambda v: kind(
        **{name: _apply(f, v[name]) for name, f, absent in parts if not absent or name in v}
    )


def _apply(convert: Convert | None, value: Any) -> Any:
    return value if convert is None else convert(value)


def _bare(kind: Any) -> Any:
    """A NewType is its supertype at run time."""
    return getattr(kind, "__supertype__", kind)


def _fields(kind: Any) -> list[tuple[str, Any]]:
    """Name and type of each field that is written."""
    hints = get_type_hints(kind)
    return [(f.name, hints[f.name]) for f in fields(kind) if "transient" not in f.metadata]
