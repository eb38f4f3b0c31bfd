"""Operations of a replica: methods that rank 0 calls, and that every rank of its replica executes.

    class Trainer:
        replica: Replica

        @on_every_rank
        def commit(self, version: Version, lr: float) -> None: ...

Rank 0 announces the call before it executes it. The other ranks call ``follow``, which executes
what is announced, in that order. Arguments travel as JSON, encoded by their annotations.
Keyword-only parameters do not travel: each rank has its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_type_hints

from pydantic import TypeAdapter

from policy_worker.ranks.rank_group import STOP, RankGroup
from policy_worker.rows.replica import Replica, ReplicaBroken

P = ParamSpec("P")
R = TypeVar("R")


class OnRank(Protocol):
    replica: Replica


T = TypeVar("T", bound=OnRank)
_OPERATIONS: dict[str, _Operation] = {}


class _Operation:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._signature = inspect.signature(method)

    @functools.cached_property
    def _types(self) -> dict[str, TypeAdapter[Any]]:
        """Types of the parameters that travel as JSON; at the first use the module is whole."""
        hints = get_type_hints(self._method, include_extras=True)
        return {
            name: TypeAdapter(hints[name])
            for name, parameter in self._signature.parameters.items()
            if name != "self" and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        }

    def announce(self, target: OnRank, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind(target, *args, **kwargs).arguments
        coded = {
            name: kind.dump_python(given[name], mode="json")
            for name, kind in self._types.items()
            if name in given
        }
        target.replica.announce(self._method.__name__, **coded)

    def decode(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: self._types[name].validate_python(arguments[name]) for name in arguments}


def on_every_rank(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Declares ``method`` an operation of the replica."""
    operation = _OPERATIONS[method.__name__] = _Operation(method)

    @functools.wraps(method)
    def announced(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.replica.size > 1 and self.replica.leads:
            operation.announce(self, args, kwargs)
        return method(self, *args, **kwargs)

    return announced


def follow(
    replica: RankGroup,
    targets: Callable[[], Sequence[OnRank]],
    may_fail: tuple[type[Exception], ...],
) -> None:
    """Ranks above 0: executes what rank 0 announces on the one of ``targets`` that has it, until it
    announces the end. ``may_fail``: errors with which the operation fails on rank 0, too, which
    decides what comes next."""
    while (announced := replica.next_operation())[0] != STOP:
        name, arguments = announced
        target = next((t for t in targets() if hasattr(t, name)), None)
        if target is None or name not in _OPERATIONS:
            raise ReplicaBroken(f"rank 0 announced {name!r}, which this rank does not have")
        try:
            getattr(target, name)(**_OPERATIONS[name].decode(arguments))
        except may_fail:
            continue
