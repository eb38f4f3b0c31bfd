"""A run's journal is followed over failovers and quiet times, each event once."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from paceline.observe.run_watcher import follow_events
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from tests.fakes.peer import Peer

# Entries of two, four and one events: all but an entry's last carry the position before it. The
# follower asks anew when the run has ended, here in the middle of an entry.
RECORDS = [
    ("0-0", {"type": "RunStarted"}),
    ("1-0", {"type": "TermBegun"}),
    ("1-0", {"type": "A"}),
    ("1-0", {"type": "B"}),
    ("1-0", {"type": "RunFinished"}),
    ("2-0", {"type": "WorkerChanged"}),
    ("3-0", {"type": "CheckpointRecorded"}),
]


class Torn(Peer):
    """Serves the journal; its streams break after so many records, the last one never."""

    def __init__(self, breaks: list[int]) -> None:
        self.breaks = breaks
        self.asked: list[str] = []

    async def WatchEvents(
        self, request: admin_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[admin_pb2.EventRecord]:
        self.asked.append(request.after)
        ends = [index for index, (at, _) in enumerate(RECORDS) if at == request.after]
        # The first record of a position ends its entry.
        rest = RECORDS[ends[0] + 1 :] if ends and request.after != "0-0" else RECORDS
        limit = self.breaks.pop(0) if self.breaks else len(rest)
        for position, event in rest[:limit]:
            yield admin_pb2.EventRecord(position=position, json=json.dumps(event))
        await context.abort(grpc.StatusCode.UNAVAILABLE, "leader lost")

    async def GetStatus(
        self, request: admin_pb2.StatusRequest, context: Any
    ) -> admin_pb2.StatusReply:
        return admin_pb2.StatusReply(phase="running")


async def followed(breaks: list[int]) -> tuple[list[str], list[str]]:
    """Types of the events that a follower gets, and the positions that were asked from."""
    torn = Torn(breaks)
    control = ControlPlane([await torn.start()])
    try:
        seen = [e["type"] async for _, e in follow_events(control, gone_s=0.3)]
    finally:
        await control.close()
        await torn.close()
    return seen, torn.asked


@pytest.mark.heavy
async def test_who_is_cut_off_within_an_entry_gets_nothing_twice() -> None:
    wanted = [event["type"] for _, event in RECORDS]
    for cut in range(1, len(RECORDS)):
        seen, asked = await followed([cut])
        assert seen == wanted, f"cut after {cut}"
        assert len(asked) > 1


async def test_cuts_in_a_row_lose_nothing_and_repeat_nothing_nor_what_comes_after_the_end() -> None:
    seen, _ = await followed([1, 1, 3, 2, 1])
    assert seen == [event["type"] for _, event in RECORDS]
