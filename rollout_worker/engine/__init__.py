"""Engines: token ids in, token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_worker.engine.base import Engine, EngineError

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from rollout_worker.tokenizer import PromptTokenizer


def make_engine(config: Config, tokenizer: PromptTokenizer) -> Engine:
    """The engine that ``rollout.engine`` names, not started. Raises EngineError."""
    if config.rollout.engine == "transformers":
        from rollout_worker.engine.transformers_engine import TransformersEngine

        return TransformersEngine(
            config, decode_text=tokenizer.decode_all, end_tokens=tokenizer.end_tokens
        )
    raise EngineError(
        f'rollout.engine = "{config.rollout.engine}" is not available here: use "transformers"'
    )
