"""Poller of a run for its supervisor: the leader's status and new lines of events.jsonl."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.run_view.event_follower import leader_status
from paceline.run_view.file_tail import FileTail
from paceline.v1 import admin_pb2

ASK_LIMIT_S = 2.0


class StatusPoller:
    """``poll`` refreshes ``status`` and passes each new event to ``on_event`` once."""

    def __init__(
        self, control: ControlPlane, run_dir: Path, on_event: Callable[[dict[str, Any]], None]
    ) -> None:
        self._control = control
        self._tail = FileTail(run_dir / "events.jsonl")
        self._new_events()  # what an earlier session of the run left is no news
        self._on_event = on_event
        self.status: admin_pb2.StatusReply | None = None
        self.refused = ""
        """Why the controllers refuse to answer; empty while they answer or while none is up."""

    async def poll(self) -> bool:
        """Whether a controller answered."""
        for event in await asyncio.to_thread(self._new_events):
            self._on_event(event)
        try:
            self.status = await leader_status(self._control, ASK_LIMIT_S)
        except ControlPlaneUnavailable:
            return False
        except RequestRefused as error:
            self.refused = error.message
            return False
        self.refused = ""
        return True

    def _new_events(self) -> list[dict[str, Any]]:
        return [event for _, event in self._tail.records()]
