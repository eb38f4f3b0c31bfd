"""Readers of a controller: they share its answers, and a small part of its time.

    request ──► turn (so many a second) ──► the same question is answered? ──► that answer
                                                     │ no
                                                     ▼
                              one computation at a time, and a rest after each

Anyone on the machine may read, the leader's event loop decides for the whole fleet, and a client
that repeats a request as fast as it can would take as much of it as it gets. So requests wait for
their turn, which costs nothing, in two lanes: whoever presents the token does not stand behind
strangers. Who would wait too long is answered with 503 and ``Retry-After``, after a pause: a client
that ignores it is then no faster than the others.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

RATE = 100.0  # Requests a second of one lane, in the long run
BURST_S = 2.0  # A lane that was quiet may have so many seconds' requests at once
LONGEST_WAIT_S = 5.0
REFUSED_AFTER_S = 1.0
REST = 4.0
"""After a computation the next one waits this many times as long: readers take a fifth of the
time, and an answer is good for as long."""
LONGEST_REST_S = 0.5
MOST_WAITING = 32  # Questions that wait to be computed
KEPT_ANSWERS, KEPT_BYTES = 64, 1 << 20

Key = tuple[str, bytes]  # Path and query


@dataclass(slots=True)
class Lane:
    """Turns of one kind of readers."""

    clock: Callable[[], float] = time.monotonic
    _next_t: float = -BURST_S

    def wait_s(self) -> float | None:
        """Seconds until the turn of a request that comes now; None: it would be too long."""
        now = self.clock()
        turn = max(self._next_t, now - BURST_S)
        if turn - now > LONGEST_WAIT_S:
            return None
        self._next_t = turn + 1.0 / RATE
        return max(0.0, turn - now)


class Busy(Exception):
    """Too many questions wait already."""


@dataclass(slots=True)
class SharedReads:
    """Middleware around the application ``app`` for the requests that ``shares`` accepts."""

    app: ASGIApp
    shares: Callable[[Scope], bool]
    refuse: ASGIApp  # Answers a request that cannot be computed now
    _answers: OrderedDict[Key, tuple[float, list[Message]]] = field(default_factory=OrderedDict)
    """Messages of the answer, and until when it is good."""
    _asked: dict[Key, asyncio.Task[list[Message]]] = field(default_factory=dict)
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _rest_until: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.shares(scope):
            if scope.get("method") == "POST":
                # What was asked before a command is no answer to who asks after it.
                self._answers.clear()
                self._asked = {}
            await self.app(scope, receive, send)
            return
        key = scope["path"], scope["query_string"]
        good_until, messages = self._answers.get(key, (0.0, []))
        if time.monotonic() >= good_until:
            try:
                messages = await self._ask(key, scope)
            except Busy:
                await self.refuse(scope, receive, send)
                return
        for message in messages:
            await send(dict(message))

    async def _ask(self, key: Key, scope: Scope) -> list[Message]:
        task = self._asked.get(key)
        if task is None:
            if len(self._asked) >= MOST_WAITING:
                raise Busy
            task = self._asked[key] = asyncio.create_task(self._compute(key, scope))
            task.add_done_callback(lambda done: self._forget(key, done))
        # One reader that goes away does not take the answer from the others.
        return await asyncio.shield(task)

    def _forget(self, key: Key, done: asyncio.Task[list[Message]]) -> None:
        if self._asked.get(key) is done:
            del self._asked[key]
        if not done.cancelled():
            done.exception()

    async def _compute(self, key: Key, scope: Scope) -> list[Message]:
        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        async with self._computing:
            await asyncio.sleep(max(0.0, self._rest_until - time.monotonic()))
            began = time.monotonic()
            try:
                await self.app(scope, nothing, collect)
            except Exception:
                # The framework raises what it has answered with a 500.
                log.exception("a read failed path=%s", scope["path"])
                if not messages:
                    raise
            ended = time.monotonic()
            rest_s = min(LONGEST_REST_S, REST * (ended - began))
            self._rest_until = ended + rest_s
        size = sum(len(message.get("body", b"")) for message in messages)
        if size <= KEPT_BYTES and self._asked.get(key) is asyncio.current_task():
            self._answers[key] = ended + rest_s, messages
            self._answers.move_to_end(key)
            while len(self._answers) > KEPT_ANSWERS:
                self._answers.popitem(last=False)
        return messages
