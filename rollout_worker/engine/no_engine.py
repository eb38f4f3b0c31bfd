"""No engine: the stand-in in a run of recorded data. Generates nothing, loads nothing."""

from collections.abc import Mapping

from torch import Tensor

from rollout_worker.engine.base import Completion, Engine, EngineError, EngineStats, Request

_WHY = "a run of recorded data has no engine"


class NoEngine(Engine):
    vocabulary = 0

    def __init__(self, longest_sequence: int) -> None:
        self.max_context = longest_sequence
        self._rows = 0

    def row_encoded(self) -> None:
        """Counts as a sample: the worker makes progress."""
        self._rows += 1

    async def start(self) -> None:
        """There is nothing to load."""

    async def generate(self, request: Request) -> tuple[Completion, ...]:
        raise EngineError(_WHY)

    def abort(self, request_id: str) -> None:
        """Nothing runs."""

    async def load_weights(self, version: int, tensors: Mapping[str, Tensor]) -> float:
        raise EngineError(_WHY)

    @property
    def version(self) -> int:
        return 0  # as its recorded tokens

    def stats(self) -> EngineStats:
        return EngineStats(samples=self._rows)

    async def close(self) -> None:
        """Nothing was started."""
