"""Loading of received weights into the engine, and the end of a worker that cannot load them.

receiver's thread ──► on_weights ── waits ──► load (event loop) ──► engine.load_weights

While the device is another process's, weights wait here, in host memory; the newest are loaded when
it comes back (turns).
"""

import asyncio
import logging
import threading
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from paceline.errors import one_line
from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.process.structured_log import event
from paceline.rpc.session import WorkerSession
from paceline.weights.weight_transfer import StagedWeights
from rollout_worker.engine.base import EngineError, ParametersDiffer, SwapFailed, WeightMismatch
from rollout_worker.held_tasks import Stage
from rollout_worker.lifecycle import WorkerLifecycle
from rollout_worker.tasks.task_runner import TaskRunner
from rollout_worker.weight_receiver import NotLoaded

log = logging.getLogger(__name__)

LOAD_TRIES = 3
"""After so many versions in a row that could not be staged or loaded, on one link after the other,
the worker ends: its engine would never follow the trainer."""
PARITY_TRIES = 3
"""After so many swaps whose parameters differed from the weights, the worker ends: its
memory, device or engine does not keep what is written to it."""


@dataclass
class WeightLoader:
    session: WorkerSession
    tasks: TaskRunner
    lifecycle: WorkerLifecycle
    loop: asyncio.AbstractEventLoop
    _failed: int = 0  # In a row
    replacing: bool = False
    """The version that the engine serves was never committed and is being replaced."""
    parity_failures: int = 0  # Of this incarnation
    _distrusted: int = 0  # Failures of this process, whatever incarnation they came to
    parity_detail: str = ""  # Detail of the newest of them
    failures: int = 0  # Versions that came to this incarnation and could not be staged or loaded
    failure_detail: str = ""  # Detail of the newest of them
    _handed: Future[None] | None = None  # The newest load that the receiver's thread has asked for
    _closed: bool = False
    _handing_over: threading.Lock = field(default_factory=threading.Lock)
    turns: bool = False
    """The engine loses its weights at the end of each turn: the newest stay here."""
    _newest: StagedWeights | None = None
    _paused: bool = field(init=False)
    _loads: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._paused = self.turns

    @property
    def unwanted(self) -> str:
        """Reason for which no task can be worked on now; empty if tasks can."""
        if self.replacing:
            return "weights_withdrawn"
        return "weights_differ" if self.parity_detail and self.tasks.engine.version < 0 else ""

    def on_weights(self, staged: StagedWeights) -> None:
        """In the receiver's thread: returns once the engine serves them. Raises NotLoaded, or
        EpochCancelled once the loader is closed."""
        with self._handing_over:
            if self._closed:
                raise EpochCancelled("the worker ends")
            self._handed = asyncio.run_coroutine_threadsafe(self.load(staged), self.loop)
        try:
            self._handed.result()
        except CancelledError as error:
            raise EpochCancelled("the worker ends") from error
        except Exception as error:
            raise NotLoaded(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Frees the receiver's thread, whether or not the event loop still runs."""
        with self._handing_over:
            self._closed = True
            if self._handed is not None:
                self._handed.cancel()

    def on_staging_failure(self, error: Exception) -> None:
        """In the receiver's thread: weights that came could not be kept."""
        self.loop.call_soon_threadsafe(self._failure, "staged", error)

    def new_incarnation(self) -> None:
        self.parity_failures = self.failures = 0

    def arriving(self) -> None:
        """In the receiver's thread: a newer version begins to come. The one that waits makes room
        for it, because it would not be loaded any more."""
        if self._paused:
            self._newest = None

    async def pause(self) -> None:
        """From now on weights wait; returns when none are being loaded."""
        self._paused = True
        async with self._loads:
            pass

    async def resume(self) -> None:
        """Loads the newest that came so far, and from now on those that come. What does not load is
        tried again from here: no link brings again what has arrived. Raises EngineError once the
        worker ends for it."""
        async with self._loads:
            self._paused = False
            while self._newest is not None:
                try:
                    await self._load(self._newest)
                    break
                except (SwapFailed, ParametersDiffer):
                    if self._failed >= LOAD_TRIES or self._distrusted >= PARITY_TRIES:
                        raise

    async def load(self, staged: StagedWeights) -> None:
        """Loads them, or keeps them for resume()."""
        async with self._loads:
            if self.turns:
                self._newest = staged
            if not self._paused:
                await self._load(staged)

    async def _load(self, staged: StagedWeights) -> None:
        self.replacing = staged.version <= self.tasks.engine.version
        if self.replacing:
            # Tokens tagged with this version would be taken for those of the new weights.
            self.tasks.hand_back("weights_withdrawn", Stage.GENERATING)
        try:
            pause_s = await self.tasks.engine.load_weights(staged.version, staged.tensors)
            self._failed = 0
        except Exception as error:
            match error:
                case ParametersDiffer():
                    self._distrust(error)
                case WeightMismatch():
                    why = f"weights {staged.version} do not fit model.path: {error}"
                    self.lifecycle.engine_failed(why)
                case EngineError() if not isinstance(error, SwapFailed):
                    self.lifecycle.engine_failed(f"weights {staged.version} not loaded: {error}")
                case _:
                    self._failure("loaded", error)
            raise
        finally:
            self.replacing = False
        pause_ms, ms, version = pause_s * 1e3, staged.seconds * 1e3, staged.version
        event(log, "weights loaded", version=version, pause_ms=pause_ms, transfer_ms=ms)
        self.session.poke()
        self.tasks.held.room.set()

    def _failure(self, what: str, error: Exception) -> None:
        """The link is replaced and brings the weights again; until then the old ones serve on."""
        self._failed += 1
        self.failures += 1
        self.failure_detail = f"weights not {what}: {one_line(error)}"
        event(log, "weights failed", logging.ERROR, tries=self._failed, detail=self.failure_detail)
        self.session.poke()
        if self._failed >= LOAD_TRIES:
            why = f"weights failed to load {LOAD_TRIES} times: {one_line(error)}"
            self.lifecycle.engine_failed(why)

    def _distrust(self, error: ParametersDiffer) -> None:
        """The engine serves nothing until the weights are loaded again, over a new link."""
        self.parity_failures += 1
        self._distrusted += 1
        self.parity_detail = str(error)
        event(log, "parameters differ", logging.ERROR, failures=self._distrusted, detail=error)
        self.tasks.hand_back("weights_differ", Stage.GENERATING)
        self.session.poke()
        if self._distrusted >= PARITY_TRIES:
            why = f"parameters differed from the weights after {PARITY_TRIES} swaps: {error}"
            self.lifecycle.engine_failed(why)
