"""REST URLs of the run's controllers, for redirects, origins and the dashboard."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.replicated_controller import Controller


def leader_url(controller: Controller) -> str:
    """REST URL of the leader; empty if there is no leader or if it serves no REST interface."""
    if controller.leader is not None:
        return controller.rest_url
    for peer in controller.peers.values():
        if controller.hint and peer["address"] == controller.hint:
            return str(peer.get("rest") or "")
    return ""


def other_urls(controller: Controller) -> list[str]:
    """REST URLs of the other controllers, silent ones included."""
    own = controller.identity.controller_id
    urls = (peer.get("rest") for name, peer in controller.peers.items() if name != own)
    return [url for url in urls if url]
