"""Running fleet as its controllers tell of it, across failovers, until the run is over."""

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from paceline.observe.event_history import ENDS
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from paceline.v1 import admin_pb2

IDLE_S = 30.0  # After so long without a message, another controller is asked
GONE_S = 60.0  # After so long without an answer, the controllers are considered gone
FAREWELL_S = 2.0  # GONE_S once the run is over
LEADER_S = 0.5  # Time limit for the leader, if another controller has answered already
START = "0-0"


async def follow_events(
    control: ControlPlane, after: str = "", *, gone_s: float = GONE_S
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields (journal position, event record) after ``after``, as events happen. Returns once the
    run is over and no controller is left. Raises ControlPlaneUnavailable if no controller answers
    for ``gone_s`` seconds before that."""
    over = False
    seen = 0  # events of the entry after ``after``: a new request repeats the entry from its start
    while True:
        request = admin_pb2.WatchRequest(after=after, follow=True)
        skip, seen = seen, 0
        limit_s = min(gone_s, FAREWELL_S) if over else gone_s
        try:
            records = control.stream(
                "AdminService.WatchEvents", request, idle_s=IDLE_S, timeout_s=limit_s
            )
            async with aclosing(records):
                async for record in records:
                    seen = seen + 1 if record.position == (after or START) else 0
                    after = record.position
                    if skip:
                        skip -= 1
                        continue
                    event = json.loads(record.json)
                    yield after, event
                    if event.get("type") in ENDS and not over:
                        over = True
                        break
                else:
                    return
        except ControlPlaneUnavailable:
            if over:
                return
            # The time limit counts from the newest event, and a paused run has none.
            await control.call(
                "AdminService.GetStatus", admin_pb2.StatusRequest(), timeout_s=gone_s
            )


async def leader_status(control: ControlPlane, timeout_s: float) -> admin_pb2.StatusReply:
    """The run's status from its leader, which alone has heartbeats and gauges; from another
    controller if the leader cannot be reached. Raises ControlPlaneUnavailable and
    RequestRefused."""
    request = admin_pb2.StatusRequest()
    found: admin_pb2.StatusReply = await control.call(
        "AdminService.GetStatus", request, timeout_s=timeout_s
    )
    leader = next((c.address for c in found.controllers if c.state == "leader"), "")
    if leader not in ("", control.address):
        ask = control.bind(leader, "AdminService.GetStatus")
        with contextlib.suppress(grpc.aio.AioRpcError):
            own = await ask(request, timeout=LEADER_S, metadata=control.metadata)
            found = own if own.term >= found.term else found
    return found
