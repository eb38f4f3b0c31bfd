"""One payload store in memory whose failures a test scripts."""

import asyncio
from collections.abc import Mapping, Sequence

from paceline.payloads.store import Payloads, Ref
from paceline.process import waits


class ScriptedStore:
    """Writes fail with each of ``failures`` first. ``largest``: bytes of a payload."""

    def __init__(self, *failures: Exception, largest: int = 1 << 20) -> None:
        self.failures = list(failures)
        self.largest = largest
        self.payloads: dict[Ref, bytes] = {}
        self.written = self.writes = 0
        """Bytes and requests of the writes that did not fail."""
        self.waits: list[waits.Wait] = []
        """Of this process at the last attempt."""
        self._left: dict[int, asyncio.Event] = {}

    async def tried(self, times: int) -> None:
        """Returns after so many more attempts."""
        await self._left.setdefault(len(self.failures) - times, asyncio.Event()).wait()

    async def put(self, payloads: Mapping[Ref, bytes]) -> None:
        self.waits = waits.present(0.0)
        if reached := self._left.get(len(self.failures)):
            reached.set()
        if self.failures:
            raise self.failures.pop(0)
        self.writes += 1
        self.written += sum(map(len, payloads.values()))
        self.payloads.update(payloads)

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        return [self.payloads.get(ref) for ref in refs]
