"""Import of the environment that ``rollout.environment`` names."""

from __future__ import annotations

import inspect
from typing import Any, cast

from paceline.process.user_code import NotFound, find
from rollout_worker.environments.base import BadEnvironment, Environment


def load(name: str) -> Environment:
    """Raises BadEnvironment, with what is wrong with the name or with what it names."""
    try:
        target: Any = find(name)
    except NotFound as error:
        raise _bad(name, str(error)) from error
    call = target if inspect.isroutine(target) else getattr(target, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(call):
        raise _bad(name, "it must be an async function of (task, sample)")
    try:
        inspect.signature(target).bind(None, None)
    except (TypeError, ValueError):
        raise _bad(name, "it must take two arguments, (task, sample)") from None
    return cast(Environment, target)


def _bad(name: str, why: str) -> BadEnvironment:
    return BadEnvironment(f"rollout.environment = {name!r}: {why}")
