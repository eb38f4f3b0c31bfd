"""Running fleet as its controllers tell of it, across failovers, until the run is over."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from paceline.observe.event_history import ENDS
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from paceline.v1 import admin_pb2

WAIT_S = 10.0
GONE_S = 60.0  # After so long without an answer, the controllers are considered gone
FAREWELL_S = 2.0  # GONE_S once the run is over
LEADER_S = 0.5  # Time limit for the leader, if another controller has answered already


async def follow_events(
    control: ControlPlane, after: str = "", *, follow: bool = True, gone_s: float = GONE_S
) -> AsyncIterator[dict[str, Any]]:
    """Yields the events after the journal position ``after``, those that happen meanwhile included.
    Returns once the run is over and no controller is left; without ``follow``, once there is no
    event. Raises ControlPlaneUnavailable if no controller answers for ``gone_s`` seconds before."""
    over = False
    while True:
        limit_s = min(gone_s, FAREWELL_S) if over else gone_s
        wait_s = min(WAIT_S, limit_s / 2) if follow else 0.0
        request = admin_pb2.EventsRequest(after=after, wait_s=wait_s)
        try:
            reply = await control.call("AdminService.ReadEvents", request, timeout_s=limit_s)
        except ControlPlaneUnavailable:
            if over:
                return
            raise
        for event in map(json.loads, reply.events):
            over = over or event.get("type") in ENDS
            yield event
        after = reply.position
        if not (follow or reply.events):
            return


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
