"""An engine of the user's own, which ``rollout.engine`` names as ``package.module:Class``."""

from collections.abc import Callable

from paceline.process.lifetime import leave_after
from paceline.process.user_code import NotFound, asked, find
from rollout_worker.engine.base import Engine, EngineError


def own_engine(name: str) -> Callable[..., Engine]:
    """The class, which is made from the whole configuration and the tokenizer. Raises EngineError
    if it cannot be found, is no Engine, or lacks a method."""
    try:
        found = find(name)
    except NotFound as error:
        raise EngineError(f"rollout.engine = {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise EngineError(
            f"rollout.engine = {name!r} is no subclass of rollout_worker.engine.base.Engine: "
            "derive it from that class"
        )
    if missing := ", ".join(sorted(found.__abstractmethods__)):
        raise EngineError(
            f"rollout.engine = {name!r} lacks {missing}: define what Engine declares abstract"
        )
    return found


def main() -> int:
    """Imports an engine as a rollout worker does: ``python -P -m rollout_worker.engine.own_engine
    package.module:Class``. The exit status is 2, with one line on standard error, if it cannot be
    used."""
    own_engine(asked()["name"])
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
