"""Which of this machine's addresses others can reach it at."""

from __future__ import annotations

import socket


def own_address(peer: str) -> str:
    """Address of this machine on the way to ``peer`` ("host:port"); sends nothing.

    127.0.0.1 where the peer is on loopback or cannot be resolved.
    """
    host, _, port = peer.rpartition(":")
    host = host.removeprefix("dns:///").strip("[]") or "127.0.0.1"
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, int(port) if port.isdigit() else 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket only chooses a route.
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError:
        return "127.0.0.1"
    return "127.0.0.1" if own.startswith("127.") or own == "::1" else own
