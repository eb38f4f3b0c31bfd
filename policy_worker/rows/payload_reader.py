"""Payloads of groups from the store, for the thread of a rank.

A payload that the store does not have is lost; a store that does not answer only delays. What has
arrived is not asked for again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

from paceline.ids import TaskId
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import Payloads, PayloadStore, StoreUnavailable
from paceline.process.structured_log import event
from paceline.process.threads import BackgroundLoop

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
LOOK_S = 0.05
"""Time after which a blocked reader asks again whether it is to give up."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """The place of the payloads of a run: arguments of open_payloads()."""

    urls: Sequence[str]
    run_id: str
    redis_url: str


class PayloadReader:
    def __init__(self, place: StorePlace) -> None:
        """Raises BadInput if the store cannot be opened on this host."""
        self._store = open_payloads(place.urls, place.run_id, place.redis_url)
        self._background = BackgroundLoop("payloads")

    def fetch(self, keys: Sequence[tuple[str, int]], over: Callable[[], bool]) -> Payloads | None:
        """The payload of each of ``keys``, in their order, and None for one that is lost. None
        instead of a list if ``over()`` turned true first."""
        reading = self._background.submit(read_payloads(self._store, keys))
        while not wait([reading], LOOK_S).done:
            if over():
                reading.cancel()
                return None
        return reading.result()

    def close(self) -> None:
        self._background.run(self._store.close())
        self._background.close()


async def read_payloads(store: PayloadStore, keys: Sequence[tuple[str, int]]) -> Payloads:
    """One payload for each of ``keys`` (task id, attempt), in their order; None for one that is
    lost. Cancel it to give up."""
    refs = [(TaskId(task_id), attempt) for task_id, attempt in keys]
    found: Payloads = []
    pause_s = FIRST_RETRY_S
    while len(found) < len(refs):
        try:
            async for payload in store.stream(refs[len(found) :]):
                found.append(payload)
                pause_s = FIRST_RETRY_S
        except StoreUnavailable as error:
            event(log, "payloads delayed", logging.WARNING, have=len(found), why=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)
    return found
