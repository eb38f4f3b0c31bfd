"""Server-sent events, resumed after ``Last-Event-ID``."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response, StreamingResponse

from controller.replicated_controller import Controller
from controller.rest.queries import dumps, parse_id
from controller.rest.schemas import Problem, documented
from paceline.observe.event_history import Key
from paceline.observe.projection import Projection

HEARTBEAT_S = 5.0
LAG_S = 0.5  # Events of so long are sent together
MOST_STREAMS = 32
AT_ONCE = 500


@dataclass(slots=True)
class EventStreams:
    controller: Controller
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _open: int = 0
    _asked: dict[Key | None, asyncio.Task[list[tuple[Key, bytes]]]] = field(default_factory=dict)

    def close(self) -> None:
        self._closing.set()

    def enter(self) -> None:
        """Raises Problem if too many streams are open."""
        if self._open >= MOST_STREAMS:
            raise Problem(503, "too many event streams are open", {"Retry-After": "5"})

    async def events(self, key: Key | None) -> AsyncIterator[bytes]:
        self._open += 1
        try:
            yield b"retry: 1000\n\n"
            spoken = time.monotonic()
            while not self._closing.is_set():
                found = await self._after(key)
                for _, block in found:
                    yield block
                if found:
                    key = found[-1][0]
                    spoken = time.monotonic()
                    if len(found) == AT_ONCE:
                        continue
                elif time.monotonic() - spoken > HEARTBEAT_S:
                    spoken = time.monotonic()
                    yield b": still here\n\n"
                await self._more()
        finally:
            self._open -= 1

    async def _after(self, key: Key | None) -> list[tuple[Key, bytes]]:
        """The events after ``key``. Streams that are at the same place, as all are that have
        caught up, share one answer."""
        asked = self._asked.get(key)
        if asked is None:
            ask = self.controller.context.projector.ask(partial(_lines, key=key))
            asked = self._asked[key] = asyncio.create_task(ask)
            asked.add_done_callback(lambda _: self._asked.pop(key, None))
        return await asyncio.shield(asked)

    async def _more(self) -> None:
        """Returns when there may be more events: the journal grew, or a second has passed."""
        topic = self.controller.journal_topic
        grown = asyncio.create_task(topic.wait(topic.turn, 1.0))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({grown, closing}, return_when=asyncio.FIRST_COMPLETED)
            # Many entries of a busy run are sent together.
            await asyncio.wait({closing}, timeout=LAG_S)
        finally:
            grown.cancel()
            closing.cancel()


def _lines(run: Projection, key: Key | None) -> list[tuple[Key, bytes]]:
    found = run.history.after(key, limit=AT_ONCE)
    return [
        (e.key, f"id: {e.id}\nevent: {e.severity}\ndata: ".encode() + dumps(e.to_json()) + b"\n\n")
        for e in found
    ]


def router(streams: EventStreams) -> APIRouter:
    routes = APIRouter(prefix="/api/v1", responses=documented(401, 403, 422, 500, 503))

    @routes.get(
        "/events/stream",
        summary="Events as they happen",
        description=(
            "Server-sent events named by their severity. A client that reconnects with "
            "Last-Event-ID to any controller receives every event exactly once."
        ),
        tags=["events"],
        response_class=Response,
        responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
    )
    async def stream(
        since: Annotated[str, Query(max_length=64)] = "",
        last_event_id: Annotated[str | None, Header(max_length=64)] = None,
    ) -> Response:
        key = parse_id(last_event_id or since)
        streams.enter()
        return StreamingResponse(streams.events(key), media_type="text/event-stream")

    return routes
