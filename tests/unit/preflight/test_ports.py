"""A server that is restarted finds its port free again; one that cannot be had is named."""

import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.config.schema import Config
from paceline.observe.fleet_file import FleetRecord, ProcessId, ProcessRecord
from paceline.rpc.addresses import bound_socket, free_ports, taken_ports
from paceline_launcher.preflight.findings import Start
from paceline_launcher.preflight.network import agents
from paceline_launcher.preflight.network import ports as check_ports
from tests.fixtures.configs import config_of


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


def failures(config: Config, run_dir: Path) -> list[str]:
    return [str(check) for check in check_ports(Start(config, run_dir)) if check.state == "fail"]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"controller": {"port": "taken"}}, "controller.port: port {taken} of"),
        ({"rest": {"port": "taken"}}, "rest.port: port {taken} of"),
        ({"rest": {"port": "taken", "enabled": False}}, ""),
        ({"controller": {"port": 65535}}, "controller.port: port 65536"),
        ({"controller": {"port": 24010}, "rest": {"port": 24011}}, "rest.port: port 24011"),
    ],
)
def test_ports_that_cannot_be_had_are_named_before_anything_starts(
    tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        for fields in sections.values():
            fields["port"] = taken if fields["port"] == "taken" else fields["port"]
        found = failures(config_of(**sections), tmp_path)
    assert len(found) == bool(said)
    assert said.format(taken=taken) in "".join(found)


def test_a_port_that_the_runs_own_leftovers_hold_is_no_hindrance(tmp_path: Path) -> None:
    """They are ended before the run goes on, or taken over; it was refused for their ports."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        config = config_of(controller={"port": holder.getsockname()[1]}, fleet={"controllers": 1})
        record = FleetRecord("run", ProcessId(1, 0.0))
        mine = ProcessId.of(os.getpid())
        record.processes.append(ProcessRecord("controller-0", "controller", "log", ids=[mine]))
        assert failures(config, tmp_path) != []
        record.write(tmp_path)
        assert failures(config, tmp_path) == []


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("127.0.0.1", ""),
        ("192.0.2.1", "'192.0.2.1'.*nothing can listen there.*Name an address of this machine"),
        ("no-such-host.invalid", "nothing can listen there"),
        ("0.0.0.0", "agents get 127.0.0.1"),
    ],
)
def test_an_endpoint_that_agents_cannot_reach_is_named(
    host: str, words: str, tmp_path: Path
) -> None:
    rollout = {"environment": "a:b", "max_context": 400, "openai": True, "openai_host": host}
    start = Start(config_of(rollout=rollout), tmp_path, here=True)
    found = " ".join(map(str, agents(start)))
    assert re.search(words, found) and bool(found) == bool(words)
