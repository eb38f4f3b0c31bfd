"""An engine of the user's own, which ``rollout.engine`` names as ``package.module:Class``."""

from __future__ import annotations

import argparse
import inspect
from typing import TYPE_CHECKING

from paceline.process.lifetime import leave_after
from paceline.process.user_code import NotFound, find
from rollout_worker.engine.base import Engine, EngineError

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.prompt_tokenizer import PromptTokenizer


def own_engine(name: str) -> type[Engine]:
    """The class. Raises EngineError if it cannot be found, is no Engine, or lacks a method."""
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
    try:
        inspect.signature(found).bind("config", "tokenizer")
    except TypeError as error:
        raise EngineError(
            f"rollout.engine = {name!r} cannot be made from a config and a tokenizer ({error}): "
            "take both in __init__"
        ) from error
    return found


def make_own_engine(config: Config, tokenizer: PromptTokenizer) -> Engine:
    """The engine of that name; it is given the whole configuration, and ``rollout.engine_options``
    in it. Raises EngineError."""
    make = own_engine(config.rollout.engine)
    engine: Engine = make(config, tokenizer)  # type: ignore[call-arg]
    return engine


def main() -> int:
    """Imports an engine as a rollout worker does: ``python -P -m rollout_worker.engine.own_engine
    package.module:Class``. The exit status is 2, with one line on standard error, if it cannot be
    used."""
    parser = argparse.ArgumentParser(prog="rollout_worker.engine.own_engine")
    parser.add_argument("engine", help="package.module:Class, as in rollout.engine")
    own_engine(parser.parse_args().engine)
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
