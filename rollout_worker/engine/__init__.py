"""Inference engines: token ids in, token ids out."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
        from rollout_worker.engine.own_engine import own_engine

        return own_engine(rollout.engine)(config, tokenizer)
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
