"""The run's controllers as the herald knows them, for redirects, origins and the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from controller.messages import SILENT_S

if TYPE_CHECKING:
    from controller.main import Controller


def leader_url(controller: Controller) -> str:
    """REST URL of the controller that holds the lease; empty: nobody does, or it has none."""
    if controller.leader is not None:
        return controller.rest_url
    for peer in controller.peers.values():
        if controller.hint and peer["address"] == controller.hint:
            return str(peer.get("rest") or "")
    return ""


def other_urls(controller: Controller) -> list[str]:
    """REST URLs of the other controllers, heard of or not lately."""
    own = controller.identity.controller_id
    urls = (peer.get("rest") for name, peer in controller.peers.items() if name != own)
    return [url for url in urls if url]


def infos(controller: Controller) -> Iterator[dict[str, Any]]:
    now = time.time()
    for controller_id, seen in sorted(controller.peers.items()):
        age_s = max(0.0, now - seen["t"])
        yield {
            "controller_id": controller_id,
            "address": seen["address"],
            "rest": str(seen.get("rest") or ""),
            "state": seen["state"] if age_s < SILENT_S else "silent",
            "pid": seen["pid"],
            "host": seen["host"],
            "heartbeat_age_s": round(age_s, 3),
        }
