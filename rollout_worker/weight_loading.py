"""Brings weights that were received to the engine, and says what its failing means.

receiver's thread ──► on_weights ── waits ──► load (event loop) ──► engine.load_weights
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from paceline.process.structured_log import event
from paceline.weights.weight_transfer import StagedWeights
from rollout_worker.engine.base import Engine, EngineError, SwapFailed, WeightsRefused

log = logging.getLogger(__name__)

LOAD_TRIES = 3
"""So often in a row may loading weights fail, on one link after the other, until the worker ends: its
engine would never follow the trainer."""


class WeightLoader:
    """``withdrawn``: tokens of weights that were never committed are to be given up. ``loaded``: a
    version is served. ``fail``: called with one line where the engine cannot follow the trainer.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        withdrawn: Callable[[], None],
        loaded: Callable[[], None],
        fail: Callable[[str], None],
    ) -> None:
        self._engine = engine
        self._withdrawn = withdrawn
        self._loaded = loaded
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._failed = 0
        """In a row."""
        self.replacing = False
        """What the engine serves was never committed and is being replaced."""

    def on_weights(self, staged: StagedWeights) -> None:
        """In the receiver's thread: returns once the engine serves them."""
        asyncio.run_coroutine_threadsafe(self.load(staged), self._loop).result()

    async def load(self, staged: StagedWeights) -> None:
        self.replacing = staged.version <= self._engine.version
        if self.replacing:
            # The version of tokens in the making names other weights from now on.
            self._withdrawn()
        try:
            pause_s = await self._engine.load_weights(staged.version, staged.tensors)
            self._failed = 0
        except SwapFailed as error:
            # The link is replaced and brings them again; until then the old ones serve on.
            self._count(error)
            raise
        except WeightsRefused as error:
            self._fail(f"weights {staged.version} do not fit model.path: {error}")
            raise
        except EngineError as error:
            self._fail(f"weights {staged.version} not loaded: {error}")
            raise
        except Exception as error:
            # Whatever it was, the link is replaced for it: not again and again for ever.
            self._count(error)
            raise
        finally:
            self.replacing = False
        event(
            log,
            "weights loaded",
            version=staged.version,
            pause_ms=pause_s * 1e3,
            transfer_ms=staged.seconds * 1e3,
        )
        self._loaded()

    def _count(self, error: Exception) -> None:
        self._failed += 1
        if self._failed >= LOAD_TRIES:
            why = str(error) or type(error).__name__
            self._fail(f"weights failed to load {LOAD_TRIES} times: {why}")
