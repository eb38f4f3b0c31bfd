"""Network addresses and free ports of this machine, and addresses of a run's controllers."""

import contextlib
import ipaddress
import json
import os
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from paceline.process.files import read_ours

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_LOWEST = 10240
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 1000


def host_name() -> str:
    """Name of the machine that a worker reports. In a pod that of its node, if PACELINE_HOST has
    it: pods come and go, and a faulty node stays."""
    return os.environ.get("PACELINE_HOST") or socket.gethostname()


def is_loopback(host: str) -> bool:
    """True if only this machine can reach ``host`` (an address or ``localhost``)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_every(host: str) -> bool:
    """True if a listener on ``host`` listens on all addresses of this machine."""
    return host in ("", "0.0.0.0", "::")


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


def interface_of(host: str) -> str:
    """Name of this machine's network interface that has ``host`` (an address or a name); empty if
    none has."""
    if is_loopback(host):
        return LOOPBACK
    try:
        wanted = {entry[4][0] for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return ""
    for name, addresses in psutil.net_if_addrs().items():
        if wanted & {entry.address.partition("%")[0] for entry in addresses}:
            return str(name)
    return ""


def written_by_controllers(run_dir: Path, field: str) -> list[str]:
    """``field`` (address or rest) of each controller's file in a run directory; may be empty."""
    found = []
    for path in sorted((run_dir / "controllers").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found.append(str(json.loads(read_ours(path)).get(field) or ""))
    return [text for text in found if text]


def free_ports(host: str, count: int) -> list[int]:
    """``count`` different ports of ``host`` to which nothing is bound. They lie below the ephemeral
    range: an outgoing connection may take a port of that range before the server binds it, or binds
    it again. Raises OSError if no port is free."""
    draw, found = random.SystemRandom(), list[int]()
    # Every port is held until all are found, so that no two are equal.
    with contextlib.ExitStack() as held:
        for _ in range(_ATTEMPTS):
            if len(found) == count:
                return found
            port = draw.randrange(_LOWEST, _first_ephemeral())
            with contextlib.suppress(OSError):
                held.enter_context(bound_socket(host, port, backlog=1))
                found.append(port)
    raise OSError(f"no free port on {host or 'any address'}")


def taken_ports(host: str, ports: Sequence[int]) -> list[int]:
    """Returns the ``ports`` on which something listens already."""
    taken = []
    for port in ports:
        try:
            bound_socket(host, port).close()
        except OSError:
            taken.append(port)
    return taken


def bound_socket(host: str, port: int, *, backlog: int = 0, shared: bool = False) -> socket.socket:
    """A TCP socket at ``port`` of an address, which listens if it has a ``backlog``. 0.0.0.0, ::
    and "" are all addresses, of IPv4 and of IPv6, as for gRPC. ``shared``: beside other sockets of
    this user that are shared. Raises OSError, and OverflowError for no port."""
    every = is_every(host) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if every or ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is named.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        option = socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        if every:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(("::" if every else host, port))
        if backlog:
            bound.listen(backlog)
    except (OSError, OverflowError):
        bound.close()
        raise
    return bound


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    # If there is no room below the range, any port will do.
    return first if first > _LOWEST + 1000 else 65536
