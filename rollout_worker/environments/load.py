"""From the name in the config to the environment."""

from __future__ import annotations

import inspect
from typing import Any

from rollout_worker.environments.base import BadEnvironment, Environment
from rollout_worker.import_by_name import NotFound, find, is_import_name

BUILTIN = {
    "calculator": "examples.environments.calculator:calculator",
    "guess_number": "examples.environments.guess_number:guess_number",
}


def load(name: str) -> Environment:
    """Raises BadEnvironment, with what is wrong with the name or with what it names."""
    path = BUILTIN.get(name, name)
    if not is_import_name(path):
        raise BadEnvironment(
            f"rollout.environment = {name!r}: neither built in ({', '.join(BUILTIN)}) nor of the "
            f"form package.module:function"
        )
    try:
        target: Any = find(path)
    except NotFound as error:
        raise BadEnvironment(f"rollout.environment = {name!r}: {error}") from error
    call = target if inspect.isroutine(target) else getattr(target, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(call):
        raise BadEnvironment(
            f"rollout.environment = {name!r}: it must be an async function of (task, sample)"
        )
    try:
        inspect.signature(target).bind(None, None)
    except (TypeError, ValueError):
        raise BadEnvironment(
            f"rollout.environment = {name!r}: it must take two arguments, (task, sample)"
        ) from None
    return target  # type: ignore[no-any-return]
