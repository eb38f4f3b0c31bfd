"""Free ports are out of reach of outgoing connections, and all addresses are of both families."""

import socket
from pathlib import Path

import pytest

from paceline.rpc.addresses import bound_socket, free_ports, taken_ports


def test_ports_are_out_of_reach_of_outgoing_connections():
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first_ephemeral = int(text.split()[0])
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert max(ports) < first_ephemeral or first_ephemeral <= 11240


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_all_addresses_are_those_of_both_families(host: str) -> None:
    try:
        own = free_ports("::1", 1)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with bound_socket(host, 0, backlog=4) as listener:
        port = listener.getsockname()[1]
        for client in ("127.0.0.1", "::1"):
            socket.create_connection((client, port)).close()
            assert taken_ports(client, [port, *own]) == [port]
