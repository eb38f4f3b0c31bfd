"""Server-sent events, resumed after ``Last-Event-ID``."""

import asyncio
import contextlib
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
from paceline.observe.event_history import Key, ListedEvent
from paceline.observe.projection import Projection

HEARTBEAT_S = 5.0
LAG_S = 0.5  # Events of so long are sent together, and a stream ends so soon
MOST_STREAMS = 32
AT_ONCE = 500


@dataclass(slots=True)
class EventStreams:
    controller: Controller
    _closing: asyncio.Event = field(default_factory=asyncio.Event)
    _open: int = 0

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
                topic = self.controller.journal_topic
                turn = topic.turn
                found = await self.controller.context.projector.ask(partial(_after, key=key))
                for event in found:
                    head = f"id: {event.id}\nevent: {event.severity}\ndata: ".encode()
                    yield head + dumps(event.to_json()) + b"\n\n"
                    key = event.key
                if found:
                    spoken = time.monotonic()
                elif time.monotonic() - spoken > HEARTBEAT_S:
                    spoken = time.monotonic()
                    yield b": still here\n\n"
                if len(found) < AT_ONCE:
                    await topic.wait(turn, LAG_S)
                    # Many entries of a busy run are sent together.
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._closing.wait(), LAG_S)
        finally:
            self._open -= 1


def _after(run: Projection, key: Key | None) -> list[ListedEvent]:
    return run.history.after(key, limit=AT_ONCE)


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
