"""An engine without a model: it says one text at every turn. For trials of environments."""

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from paceline.config.schema import Config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import Completion, Engine, EngineStats, Finish, Request


class ScriptedEngine(Engine):
    version = 0  # type: ignore[assignment]

    def __init__(self, config: Config, tokenizer: PromptTokenizer, text: str) -> None:
        self.max_context = config.longest_sequence
        self.vocabulary = 1 << 31
        self._tokens = np.array([*tokenizer.encode(text), *tokenizer.end_tokens], np.int32)

    async def start(self) -> None:
        """There is nothing to load."""

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        tokens = self._tokens[: request.params.max_tokens]
        finish = Finish.STOP if len(tokens) == len(self._tokens) else Finish.LENGTH
        logprobs = np.full(len(tokens), math.log(0.5), np.float32)
        return (Completion(tokens, logprobs, ((0, len(tokens)),), finish),) * request.count

    def abort(self, request_id: str) -> None:
        """Nothing runs."""

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        return 0.0

    def stats(self) -> EngineStats:
        return EngineStats()

    async def close(self) -> None:
        """Nothing was started."""
