"""An asyncio event loop in a daemon thread, for programs whose main thread computes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines for other threads. Call it from any thread but its own."""

    def __init__(self, name: str = "control-plane") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts ``coro`` on the loop. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop)

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Blocks until the result is there. Raises TimeoutError after ``timeout_s`` seconds."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError(
                "BackgroundLoop.run was called on its own thread and would wait for itself"
            )
        future = self.submit(coro)
        try:
            return future.result(timeout_s)
        except (concurrent.futures.TimeoutError, KeyboardInterrupt):
            future.cancel()
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancels running coroutines and ends the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
