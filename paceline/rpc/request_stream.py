"""Requests to one controller over one stream that stays open.

    send ──► frame, numbered ──► controller ──► reply of that number ──► the request's future

- A message over an open stream costs either side a fraction of a call.
- A request fails alone (refused, late), or with its stream. Either is the error that a call would
  have raised, so ``ControlPlane`` repeats it under the same rules. A reply that nobody waits for
  any more is dropped.
- A request that came too late may mean that the controller hangs: its stream gets no further
  requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from paceline.rpc.grpc_channel import LEADER_KEY
from paceline.v1 import worker_pb2

STREAMED = frozenset(
    {"RolloutService.LeaseTasks", "RolloutService.SubmitGroups", "RolloutService.ReturnTasks"}
)
"""Methods whose requests go over the stream: frequent and small. A large message would hold up
those behind it."""
FRAME_BYTES = 1 << 10
"""What a frame has around the request, at most."""
_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_DEFINITE = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED)
"""Failures of a whole stream that concern each of its requests. Any other passes."""


@dataclass(slots=True)
class _Open:
    """One request without a reply."""

    future: asyncio.Future[Any]
    reply: type[Any]
    timer: asyncio.TimerHandle


class RequestStream:
    """One stream. Belongs to the event loop on which it was opened."""

    def __init__(self, call: Any, *, largest: int) -> None:
        """``call``: WorkerService.Requests, begun. ``largest``: bytes of a message."""
        self._call = call
        self._largest = largest - FRAME_BYTES
        self._loop = asyncio.get_running_loop()
        self._numbers = count(1)
        self._open: dict[int, _Open] = {}
        self._outgoing: deque[worker_pb2.RequestFrame] = deque()
        self._due = asyncio.Event()
        self.usable = True
        """Whether it takes further requests."""
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    def send(
        self, name: str, reply: type[Any], request: Any, timeout_s: float
    ) -> asyncio.Future[Any]:
        """The reply to ``request`` of method ``name``. It may be cancelled.

        Fails with AioRpcError: the refusal of this request, DEADLINE_EXCEEDED, or UNAVAILABLE with
        the stream.
        """
        future = self._loop.create_future()
        body = request.SerializeToString()
        if len(body) > self._largest:
            detail = f"the request has {len(body)} bytes, and {self._largest} are allowed"
            future.set_exception(_failure(grpc.StatusCode.RESOURCE_EXHAUSTED, detail))
            return future
        number = next(self._numbers)
        timer = self._loop.call_later(timeout_s, self._expire, number)
        self._open[number] = _Open(future, reply, timer)
        future.add_done_callback(partial(self._left, number))
        self._put(worker_pb2.RequestFrame(number=number, method=name, body=body))
        return future

    def close(self) -> None:
        """Cancels the stream and all its requests. Idempotent."""
        self.usable = False
        for waiting in list(self._open.values()):
            waiting.future.cancel()
        self._call.cancel()
        for task in self._tasks:
            task.cancel()

    def _put(self, frame: worker_pb2.RequestFrame) -> None:
        self._outgoing.append(frame)
        self._due.set()

    def _expire(self, number: int) -> None:
        waiting = self._open[number]
        self.usable = False
        if not waiting.future.done():
            late = _failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            waiting.future.set_exception(late)

    def _left(self, number: int, _: asyncio.Future[Any]) -> None:
        """The request is over for its caller. If it has no reply, the controller need not go on
        with it."""
        waiting = self._open.pop(number, None)
        if waiting is not None:
            waiting.timer.cancel()
            self._put(worker_pb2.RequestFrame(number=number))
        if not self.usable and not self._open:
            # A stream that hangs never sends what is left to be written.
            self._call.cancel()

    async def _write(self) -> None:
        # If the stream breaks, the reading side gets the error.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._due.wait()
                self._due.clear()
                while self._outgoing:
                    await self._call.write(self._outgoing.popleft())

    async def _read(self) -> None:
        failure = _failure(grpc.StatusCode.UNAVAILABLE, "the controller has ended the stream")
        try:
            while (frame := await self._call.read()) is not grpc.aio.EOF:
                self._answered(frame)
        except grpc.aio.AioRpcError as error:
            definite = error.code() in _DEFINITE
            code = error.code() if definite else grpc.StatusCode.UNAVAILABLE
            detail = error.details() or ""
            failure = _failure(code, detail if definite else f"{error.code().name} {detail}")
        finally:
            self._end(failure)

    def _answered(self, frame: worker_pb2.ReplyFrame) -> None:
        waiting = self._open.pop(frame.number, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        if waiting.future.done():
            return
        if frame.code:
            code = _CODES.get(frame.code, grpc.StatusCode.UNKNOWN)
            waiting.future.set_exception(_failure(code, frame.message, frame.leader))
            return
        try:
            waiting.future.set_result(waiting.reply.FromString(frame.body))
        except DecodeError as error:
            waiting.future.set_exception(_failure(grpc.StatusCode.INTERNAL, f"bad reply: {error}"))

    def _end(self, failure: grpc.aio.AioRpcError) -> None:
        self.usable = False
        waiting, self._open = self._open, {}
        for one in waiting.values():
            one.timer.cancel()
            if not one.future.done():
                one.future.set_exception(failure)
        for task in self._tasks:
            task.cancel()


def _failure(code: grpc.StatusCode, detail: str, leader: str = "") -> grpc.aio.AioRpcError:
    hint = [(LEADER_KEY, leader)] if leader else []
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*hint), detail)
