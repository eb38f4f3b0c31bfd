"""Network addresses of this machine, and those of a run's controllers."""

from __future__ import annotations

import ipaddress
import json
import socket
from pathlib import Path

from paceline.process.files import read_ours


def is_loopback(host: str) -> bool:
    """True if only this machine can reach ``host`` (an address or ``localhost``)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def at(host: str, port: int) -> str:
    """Address of ``port`` on ``host``, which may be an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def port_of(address: str) -> int:
    """Port of "host:port"; 0 for a Unix socket."""
    return 0 if address.startswith("unix:") else int(address.rpartition(":")[2])


def own_address(peer: str) -> str:
    """Address from which this machine reaches ``peer`` ("host:port" or "unix:PATH"). 127.0.0.1 if
    the peer is on this machine or cannot be resolved."""
    if peer.startswith("unix:"):
        return "127.0.0.1"
    host, _, port = peer.rpartition(":")
    host = host.removeprefix("dns:///").strip("[]") or "127.0.0.1"
    try:
        own = address_towards(host, int(port) if port.isdigit() else 1)
    except OSError:
        return "127.0.0.1"
    return "127.0.0.1" if own.startswith("127.") or own == "::1" else own


def address_towards(host: str, port: int) -> str:
    """Returns this machine's address on the way to ``host``; sends nothing. Raises OSError without
    a route."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    # Connecting a datagram socket only chooses a route.
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def written_by_controllers(run_dir: Path, field: str) -> list[str]:
    """``field`` (address or rest) of each controller's file in a run directory; may be empty."""
    found = []
    for path in sorted((run_dir / "controllers").glob("*.json")):
        try:
            found.append(str(json.loads(read_ours(path)).get(field) or ""))
        except (OSError, ValueError, AttributeError):
            continue
    return [text for text in found if text]
