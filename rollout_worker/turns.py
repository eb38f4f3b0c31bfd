"""Turns of a rollout worker at a device that it shares with a policy replica (fleet.sharing).

    directive: hold ────────► engine.start (first turn) | engine.unpark ─► newest weights ─► leases
    directive: not hold ────► no leases ─► running tasks handed back, with their partial work
                                        ─► engine.park ─► parked: reported with the grant

A parked worker keeps its session and its links: versions that arrive stay in host memory, and the
newest is loaded at its next turn. It scores and submits what was generated; only what the engine
was working on goes back. Nothing is loaded on the device before the first turn.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.process.structured_log import event
from paceline.rpc.session import WorkerSession
from paceline.rpc.turn import Turn
from paceline.v1 import worker_pb2
from rollout_worker.engine.base import Engine
from rollout_worker.held_tasks import Stage
from rollout_worker.tasks.task_runner import TaskRunner
from rollout_worker.weight_loading import WeightLoader

log = logging.getLogger(__name__)

DEVICE_TAKEN = "device_taken"
"""Reason of a return: the turn is over."""
STORE_S = 10.0
"""A worker whose turn is over tries for this long to store its unfinished completions. Nobody ends
it meanwhile, as a worker that stops, and what is not stored is generated again."""


@dataclass
class Turns:
    """``start``: starts the engine; called once, when the first turn comes."""

    session: WorkerSession
    engine: Engine
    tasks: TaskRunner
    loading: WeightLoader
    start: Callable[[], Awaitable[None]]
    gauges: dict[str, float] = field(default_factory=dict)
    """Seconds of the newest switches, by part."""
    turn: Turn = field(default_factory=Turn)
    switch: str = ""
    """Part of a switch that is under way."""
    switched: int = 0
    """Parts of switches that are done."""
    _wanted: worker_pb2.Seat = field(default_factory=worker_pb2.Seat)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _started: asyncio.Event = field(default_factory=asyncio.Event)
    _ready: bool = False
    """The engine has its memory, and weights if there are any."""

    @property
    def may_compute(self) -> bool:
        """The device is this worker's, and stays so as far as is known."""
        return self._ready and self.turn.may_begin(self._wanted)

    def directed(self, directive: worker_pb2.Directive) -> None:
        if directive.seat != self._wanted:
            self._wanted = directive.seat
            self._news.set()

    @property
    def limited(self) -> bool:
        """A switch is under way, and a worker that gets no further in it is useless. A first start
        may take as long as one outside turns: it loads a model."""
        return bool(self.switch) and self._started.is_set()

    async def until_failure(self) -> None:
        """Raises EngineError once the engine has died by itself, after its start."""
        await self._started.wait()
        await self.engine.until_failure()

    async def run(self) -> None:
        """Follows the newest directive. Raises EngineError if the engine fails."""
        while True:
            await self._news.wait()
            self._news.clear()
            seat = self._wanted
            if self.turn.begins(seat):
                self.session.poke()  # before it uses the device
                if not self._ready:
                    await self._occupy()
            else:
                if self._ready:
                    await self._park()
                self.turn.ends(seat)
            self.session.poke()
            self.tasks.held.room.set()

    async def _occupy(self) -> None:
        started = self._started.is_set()
        with self._timed("unpark_s", "taking the device" if started else "starting the engine"):
            await (self.engine.unpark() if started else self.start())
        self._started.set()
        with self._timed("unpark_load_s", "loading the weights"):
            await self.loading.resume()
        self._ready = True
        s, load_s = self.gauges["unpark_s"], self.gauges["unpark_load_s"]
        event(log, "unparked", version=self.engine.version, s=s, load_s=load_s)

    async def _park(self) -> None:
        self._ready = False
        with self._timed("hand_back_s", "handing tasks back"):
            try:
                async with asyncio.timeout(STORE_S):
                    await self.tasks.leave_partial_work(Stage.GENERATING)
            except TimeoutError:
                event(log, "partial work not stored", logging.WARNING)
            self.tasks.hand_back(DEVICE_TAKEN, Stage.GENERATING)
        with self._timed("park_s", "giving the device up"):
            await self.loading.pause()
            await self.engine.park()
        event(log, "parked", hand_back_s=self.gauges["hand_back_s"], s=self.gauges["park_s"])

    @contextmanager
    def _timed(self, part: str, doing: str) -> Iterator[None]:
        begun, self.switch = time.monotonic(), doing
        yield
        self.switch, self.switched = "", self.switched + 1
        self.gauges[part] = time.monotonic() - begun
