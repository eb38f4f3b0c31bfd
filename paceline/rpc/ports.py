"""Port selection for servers that must get the same port again after a restart."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path

_LOWEST = 10240
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 1000


def free_ports(host: str, count: int) -> list[int]:
    """``count`` different ports of ``host`` to which nothing is bound. They lie below the ephemeral
    range: an outgoing connection may take a port of that range before the server binds it, or binds
    it again. Raises OSError if no port is free."""
    draw = random.SystemRandom()
    probes: list[socket.socket] = []
    try:
        for _ in range(_ATTEMPTS):
            if len(probes) == count:
                break
            probe = socket.socket()
            try:
                probe.bind((host, draw.randrange(_LOWEST, _first_ephemeral())))
            except OSError:
                probe.close()
                continue
            # Every port is held until all are found, so that no two are equal.
            probes.append(probe)
        else:
            raise OSError(f"no free port on {host or 'any address'}")
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def taken_ports(host: str, ports: Sequence[int]) -> list[int]:
    """Returns the ``ports`` on which something listens already."""
    taken = []
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((bindable(host), port))
            except OSError:
                taken.append(port)
    return taken


def bindable(host: str) -> str:
    """``host`` for a socket of IPv4: empty for all addresses."""
    return "" if host in ("0.0.0.0", "::") else host


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    # If there is no room below the range, any port will do.
    return first if first > _LOWEST + 1000 else 65536
