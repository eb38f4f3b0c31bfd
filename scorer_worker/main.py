"""Scorer worker: loads its model, answers rollout workers, and leaves when it is told to.

    rollout workers ── Score ──► server ──► scorer (model thread, or a judge) ──► scores
    controller ◄── reports ── session ── directives ──► lifecycle

If it shares a pair's device (fleet.sharing), it is there in generation's turn. Its model is loaded
into host memory and is there again in training's turn, in which requests wait.

It is a member of the fleet as any other worker, but stateless: its death costs nobody more than the
time of a request, which the rollout worker sends to another scorer. Leaving: it refuses new
requests, answers those that it has, reports STOPPED and exits 0.
"""

import argparse
import asyncio
import logging
import secrets
import time
from contextlib import nullcontext

from paceline.config.schema import Config
from paceline.errors import plural
from paceline.process import structured_log as logs
from paceline.process.lifetime import leave_on_signal
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, loading_model, waiting
from paceline.process.worker_resources import Resources
from paceline.rpc.addresses import own_address
from paceline.rpc.auth import worker_token
from paceline.rpc.client import ControlPlane
from paceline.rpc.session import WorkerSession
from paceline.rpc.turn import Turn
from paceline.v1 import common_pb2, worker_pb2
from paceline.worker_pools import seat_of
from scorer_worker.scorer import make_scorer
from scorer_worker.server import ScorerServer

log = logging.getLogger(__name__)


def run(config: Config, options: argparse.Namespace) -> int:
    """Runs until the controller says STOPPED or the worker is drained. Returns the exit status.
    Raises UserError."""
    logs.setup(options.id)
    asyncio.run(ScorerWorker(config, options).run())
    return 0


class ScorerWorker:
    def __init__(self, config: Config, options: argparse.Namespace) -> None:
        """Raises ScorerError or AuthError."""
        self.config, self.name, self.worker_id = config, options.scorer, options.id
        self.host = options.tensor_host or own_address(options.controllers[0])
        # Without a token, nobody may ask.
        self.token = worker_token(config, options.run_dir) or secrets.token_hex()
        self.control = ControlPlane.from_config(config, options.controllers, options.run_dir)
        self.lifecycle: worker_pb2.Lifecycle = worker_pb2.LIFECYCLE_STARTING
        self.resources = Resources()
        self.seat, self.turn = seat_of(config, self.worker_id, self.name), Turn()
        self.wanted = worker_pb2.Seat()
        self.switching, self.switched = False, 0
        self.gauges: dict[str, float] = {}
        """Seconds of the newest switches."""

    async def run(self) -> None:
        """From start to STOPPED. Raises RequestRefused if no leader will ever accept it."""
        loop = asyncio.get_running_loop()
        # Made here: they belong to this loop.
        self.told_to_leave, self.news_of_seat = asyncio.Event(), asyncio.Event()
        self.scorer = make_scorer(self.config, self.name)
        self.server = ScorerServer(self.config, self.name, self.scorer, self.token)
        leave_on_signal(self.stop, self.config.fleet.drain_s, loop)
        working: list[asyncio.Task[None]] = []
        try:
            session = await self._join()
            keeping = asyncio.create_task(session.run())
            leaving = asyncio.create_task(self._leave(session))
            turns = asyncio.create_task(self._take_turns(session))
            working = [keeping, leaving, turns]
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
            for task in (keeping, turns):
                if task.done():
                    task.result()
            await leaving
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)
            await self.server.close()
            await self.scorer.close()
            await self.control.close()

    async def _join(self) -> WorkerSession:
        """Loads the model, listens, and only then tells the fleet."""
        path = self.config.scorers.by_name[self.name].path
        with loading_model(path) if path is not None else nullcontext():
            await self.scorer.start()
        address = await self.server.start(self.host)
        session = WorkerSession(
            self.control,
            worker_id=self.worker_id,
            role=common_pb2.ROLE_SCORER,
            config=self.config,
            report=self.report,
            tensor_host=self.host,
            scorer=self.name,
            address=address,
            seat=self.seat,
        )
        session.on_directive(self._converge)
        with waiting(WaitKind.CONTROLLER, "registering"):
            await session.register()
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        event(log, "ready", scorer=self.name, address=address)
        return session

    async def _leave(self, session: WorkerSession) -> None:
        """Once told to: answers the open requests within fleet.drain_s, and reports STOPPED."""
        await self.told_to_leave.wait()
        self.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        session.poke()
        try:
            async with asyncio.timeout(self.config.fleet.drain_s):
                await self.server.idle.wait()
        except TimeoutError:
            event(log, "left with open requests", logging.WARNING, open=self.server.open_requests)
        self.lifecycle = worker_pb2.LIFECYCLE_STOPPED
        await session.close()
        event(log, "stopped")

    async def _take_turns(self, session: WorkerSession) -> None:
        """Follows the newest directive. Raises StillInUse, or RuntimeError if the host lacks
        memory."""
        while True:
            await self.news_of_seat.wait()
            self.news_of_seat.clear()
            seat = self.wanted
            if holds := self.turn.begins(seat):
                session.poke()  # before it uses the device
            if holds is self.scorer.parked:
                begun, self.switching = time.monotonic(), True
                await (self.scorer.unpark() if holds else self.scorer.park())
                self.switching, self.switched = False, self.switched + 1
                what = "unpark" if holds else "park"
                seconds = self.gauges[f"{what}_s"] = time.monotonic() - begun
                event(log, f"{what}ed", seat=seat.name, grant=seat.grant, s=seconds)
            if not holds:
                self.turn.ends(seat)
            session.poke()

    def leave(self) -> None:
        self.server.leaving = True
        self.told_to_leave.set()

    def stop(self) -> None:
        """Open requests are not waited for: rollout workers ask another scorer."""
        self.leave()
        self.server.idle.set()

    def _converge(self, directive: worker_pb2.Directive) -> None:
        if self.seat and directive.seat != self.wanted:
            self.wanted = directive.seat
            self.news_of_seat.set()
        if directive.lifecycle == worker_pb2.LIFECYCLE_STOPPED:
            self.stop()
        elif directive.lifecycle == worker_pb2.LIFECYCLE_DRAINING:
            self.leave()

    def report(self) -> worker_pb2.Report:
        requests = self.server.open_requests
        return worker_pb2.Report(
            lifecycle=self.lifecycle,
            progress=self.scorer.done + self.switched,
            busy=self.scorer.computing or self.switching,
            seat=self.turn.report if self.seat else None,
            state_version=-1,
            loaded_version=-1,
            gauges={
                "score_batches": float(self.scorer.done),
                "requests": float(requests),
                "queued": float(self.server.queued),
                "scored": float(self.server.scored),
                "scored_requests": float(self.server.scored_requests),
                "request_s": self.server.request_s,
                **self.gauges,
                **self.resources.read(),
            },
            activity=self._activity(requests),
        )

    def _activity(self, requests: int) -> str:
        if self.switching:
            return "taking the device" if self.scorer.parked else "parking"
        if self.scorer.parked:
            return f"parked, with {plural(requests, 'request')}" if requests else "parked"
        return f"scoring {plural(requests, 'request')}" if requests else "waiting for requests"
