"""A run's journal is followed over failovers and quiet times, each event once."""

import json
from typing import Any

import grpc
import pytest

from paceline.observe.run_watcher import follow_events
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from tests.fakes.peer import Peer

# By position of their entries.
ENTRIES = {
    "1-0": ["RunStarted", "TermBegun"],
    "2-0": ["A", "B", "RunFinished", "WorkerChanged"],
    "3-0": ["CheckpointRecorded"],
}


class Away(Peer):
    """Serves an entry in each reply, and breaks off before some; after the last it is gone."""

    def __init__(self, breaks: list[int]) -> None:
        self.breaks, self.asked = breaks, list[str]()

    async def ReadEvents(
        self, request: admin_pb2.EventsRequest, context: Any
    ) -> admin_pb2.EventsReply:
        self.asked.append(request.after)
        left = [position for position in ENTRIES if position > request.after]
        if len(self.asked) in self.breaks or not left:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "leader lost")
        events = [json.dumps({"type": kind}) for kind in ENTRIES[left[0]]]
        return admin_pb2.EventsReply(position=left[0], events=events)


async def followed(breaks: list[int]) -> tuple[list[str], list[str]]:
    """Types of the events that a follower gets, and the positions that were asked from."""
    away = Away(breaks)
    control = ControlPlane([await away.start()])
    try:
        seen = [event["type"] async for event in follow_events(control, gone_s=0.3)]
    finally:
        await control.close()
        await away.close()
    return seen, away.asked


@pytest.mark.parametrize("breaks", [[], [1], [2], [3], [1, 3, 4]])
async def test_breaks_lose_nothing_and_repeat_nothing_nor_what_comes_after_the_end(
    breaks: list[int],
) -> None:
    seen, asked = await followed(breaks)
    assert seen == [kind for kinds in ENTRIES.values() for kind in kinds]
    assert len(asked) > len(ENTRIES) + len(breaks)
