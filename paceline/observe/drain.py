"""Thread behind the journal that takes what the leader has committed, and holds up nobody.

    leader ── put ──► queue ──► thread: batches, a few times a second

The thread polls: woken for every item, it would compete with the event loop for the interpreter.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

POLL_S = 0.25


class Drain(ABC, Generic[T]):
    """Queue and thread of one consumer, from ``start`` to ``begin_close``."""

    def __init__(self, name: str, *, poll_s: float = POLL_S) -> None:
        self._items: deque[T] = deque()
        self._poll_s = poll_s
        self._closing = threading.Event()
        self._outcome: str | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        if not self._closing.is_set():
            self._thread.start()

    def put(self, item: T) -> None:
        self._items.append(item)

    def begin_close(self, outcome: str | None = None) -> None:
        """Asks the thread to take what is there and to end. Later calls change nothing.
        ``outcome``: finished or failed; None if the run goes on with another leader."""
        if not self._closing.is_set():
            self._outcome = outcome
            self._closing.set()

    def join(self, timeout_s: float) -> bool:
        """True if the thread has ended, or never began."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _serve(self) -> None:
        """Body of the thread."""

    def _batches(self) -> Iterator[list[T]]:
        """Items since the last batch, every ``poll_s``; the last batch after the call to close."""
        closing = False
        while not closing:
            # Read before the items: those that came before the call to close are taken.
            closing = self._closing.wait(self._poll_s)
            yield [self._items.popleft() for _ in range(len(self._items))]
