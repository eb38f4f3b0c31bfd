"""Requests of one stream that are not answered yet, and the replies on their way out.

    frames ──► one task a request ──► replies, in the order in which they are ready
                 ▲ cancelled if the client withdraws the request, or the stream ends

- At most MOST_OPEN requests wait for their reply or for the client to read it: beyond that the
  stream is not read, and the client's writes wait.
- A request that was decided when the stream ends stays decided: the client repeats it on another
  stream.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from paceline.groups.invalid import Invalid
from paceline.v1 import worker_pb2

MOST_OPEN = 64


class OpenRequests:
    """Those of one stream."""

    def __init__(
        self, answer: Callable[[worker_pb2.RequestFrame], Awaitable[worker_pb2.ReplyFrame]]
    ) -> None:
        """``answer`` returns the reply to a failed request, too. An exception of its own ends the
        stream."""
        self._answer = answer
        self._running: dict[int, asyncio.Task[None]] = {}
        self._replies: deque[worker_pb2.ReplyFrame] = deque()
        self._changed = asyncio.Event()
        """Set when there is a reply to send, or the stream may be over."""
        self._room = asyncio.Event()
        self._failure: Exception | None = None

    async def replies(
        self, frames: AsyncIterator[worker_pb2.RequestFrame]
    ) -> AsyncIterator[worker_pb2.ReplyFrame]:
        """Answers ``frames`` until they end and all are answered."""
        reading = asyncio.create_task(self._read(frames))
        reading.add_done_callback(lambda _: self._changed.set())
        try:
            while True:
                self._changed.clear()
                while self._replies:
                    yield self._replies.popleft()
                    self._room.set()
                if self._failure is not None:
                    raise self._failure
                if reading.done() and not self._running and not self._replies:
                    break
                await self._changed.wait()
            # If a frame was malformed, this raises the reason.
            reading.result()
        finally:
            reading.cancel()
            for task in self._running.values():
                task.cancel()

    async def _read(self, frames: AsyncIterator[worker_pb2.RequestFrame]) -> None:
        async for frame in frames:
            running = self._running.get(frame.number)
            if not frame.method:
                if running is not None:
                    running.cancel()
                continue
            if running is not None:
                raise Invalid(f"request {frame.number} of this stream is still open")
            while len(self._running) + len(self._replies) >= MOST_OPEN:
                self._room.clear()
                await self._room.wait()
            self._running[frame.number] = asyncio.create_task(self._run(frame))

    async def _run(self, frame: worker_pb2.RequestFrame) -> None:
        number = frame.number
        try:
            self._replies.append(await self._answer(frame))
        except Exception as error:
            self._failure = error
        finally:
            del self._running[number]
            self._room.set()
            self._changed.set()
