"""Follows a run for its supervisor: the leader's status, and the lines added to events.jsonl."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.run_view.event_follower import leader_status
from paceline.v1 import admin_pb2

ASK_LIMIT_S = 2.0


class StatusPoller:
    """``poll`` refreshes ``status`` and hands each new event to ``on_event`` once."""

    def __init__(
        self, control: ControlPlane, run_dir: Path, on_event: Callable[[dict[str, Any]], None]
    ) -> None:
        self._control = control
        self._tail = EventTail(run_dir / "events.jsonl")
        self._tail.read()  # what an earlier session of the run left is no news
        self._on_event = on_event
        self.status: admin_pb2.StatusReply | None = None
        self.refused = ""
        """Why the controllers refuse to answer; empty while they do or while none is up."""

    async def poll(self) -> bool:
        """False where no controller answered."""
        for event in await asyncio.to_thread(self._tail.read):
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


class EventTail:
    """New complete lines of events.jsonl, each once, also when a new leader replaces the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self._offset = 0
        self._seen: tuple[list[int], int] = ([], -1)

    def read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                inode = self._path.stat().st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        fresh = []
        for line in data.splitlines():
            event = json.loads(line)
            numbers = [int(part) for part in event["position"].replace(".", "-").split("-")]
            key = (numbers, int(event["n"]))
            if key > self._seen:
                self._seen = key
                fresh.append(event)
        return fresh
