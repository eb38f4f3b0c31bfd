"""Reader of payloads: a shard's groups from the payload store, however long the store is away.

A payload that the store does not have is lost; a store that does not answer only delays. What has arrived is not
asked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from paceline.ids import TaskId
from paceline.payloads.store import Payloads, PayloadStore, StoreUnavailable
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0


async def read_payloads(store: PayloadStore, keys: Sequence[tuple[str, int]]) -> Payloads:
    """One payload for each of ``keys`` (task id, attempt), in their order; None for one that is lost. Cancel it to
    give up."""
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
