"""The engine that ``rollout.engine`` names: one of ours, or one of the user's own as
``package.module:Class``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.process.lifetime import leave_after
from paceline.user_code import NotFound, asked, find
from rollout_worker.engine.base import Engine, EngineError
from rollout_worker.engine.without_model import NoEngine

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.prompt_tokenizer import PromptTokenizer


def make_engine(config: Config, tokenizer: PromptTokenizer) -> Engine:
    """The engine of ``rollout.engine``; NoEngine for recorded data. Raises EngineError."""
    rollout = config.rollout
    if config.recorded:
        return NoEngine(config.longest_sequence)
    if ":" in rollout.engine:
        engine: Engine = own_engine(rollout.engine, turns=config.takes_turns)(config, tokenizer)
        return engine
    if rollout.engine == "transformers":
        if rollout.on_update != "keep":
            raise EngineError(
                f'rollout.on_update = "{rollout.on_update}" needs rollout.engine = "vllm"; the '
                'transformers engine supports only "keep"'
            )
        if rollout.tensor_parallel > 1:
            raise EngineError('rollout.tensor_parallel above 1 needs rollout.engine = "vllm"')
        from rollout_worker.engine.transformers.engine import TransformersEngine

        return TransformersEngine(config, tokenizer)
    from rollout_worker.engine.vllm.engine import VLLMEngine

    return VLLMEngine(config, tokenizer)


def own_engine(name: str, *, turns: bool = False) -> type[Any]:
    """The class, which is made from the whole configuration and the tokenizer. Raises EngineError
    if it cannot be found, is no Engine, or lacks a method. ``turns``: it has to give its device
    up."""
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
    if turns and (found.park is Engine.park or found.unpark is Engine.unpark):
        raise EngineError(
            f"rollout.engine = {name!r} cannot share a device (fleet.sharing): define its park() "
            "and unpark(), or give engines devices of their own"
        )
    return found


def main() -> int:
    """Imports an engine as a rollout worker does: ``python -P -m rollout_worker.engine.choice
    package.module:Class``. The exit status is 2, with one line on standard error, if it cannot be
    used."""
    given = asked()
    own_engine(given["name"], turns=given.get("turns", False))
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
