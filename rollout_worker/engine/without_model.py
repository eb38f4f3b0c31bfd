"""Engines without a model."""

import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from paceline.config.schema import Config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Completion,
    Engine,
    EngineError,
    EngineStats,
    Finish,
    Request,
)


class NoEngine(Engine):
    """The engine of a run of recorded data: there is nothing to load, to generate or to end."""

    vocabulary = 0
    version = 0  # type: ignore[assignment]  # as its recorded tokens

    def __init__(self, longest_sequence: int) -> None:
        self.max_context = longest_sequence
        self.rows_encoded = 0  # Counted as samples: the worker makes progress

    async def start(self) -> None: ...

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        raise EngineError("a run of recorded data has no engine")

    def abort(self, request_id: str) -> None: ...

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        raise EngineError("a run of recorded data has no engine")

    def stats(self) -> EngineStats:
        return EngineStats(samples=self.rows_encoded)

    async def close(self) -> None: ...


class ScriptedEngine(NoEngine):
    """It says one text at every turn. For trials of environments."""

    vocabulary = 1 << 31

    def __init__(self, config: Config, tokenizer: PromptTokenizer, text: str) -> None:
        super().__init__(config.longest_sequence)
        self._tokens = np.array([*tokenizer.encode(text), *tokenizer.end_tokens], np.int32)

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        tokens = self._tokens[: request.params.max_tokens]
        finish = Finish.STOP if len(tokens) == len(self._tokens) else Finish.LENGTH
        logprobs = np.full(len(tokens), math.log(0.5), np.float32)
        return (Completion(tokens, logprobs, ((0, len(tokens)),), finish),) * request.count
