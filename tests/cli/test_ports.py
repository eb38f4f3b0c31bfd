"""A server that is restarted finds its port free again."""

from __future__ import annotations

from pathlib import Path

from paceline.ports import free_ports


def test_ports_are_out_of_reach_of_outgoing_connections():
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    first_ephemeral = int(text.split()[0])
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert max(ports) < first_ephemeral or first_ephemeral <= 11240
