"""The environment of a job's node is taken as launchers set it, or refused with a remedy before
anything starts."""

from __future__ import annotations

import pytest

from paceline.errors import BadInput
from paceline_launcher.launch.job import NodePlace, node_place

AT = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SECOND = AT | {"RANK": "1", "WORLD_SIZE": "2"}


def test_without_an_environment_the_job_is_this_machine() -> None:
    assert node_place({"PATH": "/bin"}) == NodePlace(0, 1, "127.0.0.1", 0)
    # These two alone are often left over from something else.
    assert node_place(AT) == NodePlace(0, 1, "127.0.0.1", 0)


def test_a_pytorchjob_counts_nodes_in_rank_and_world_size() -> None:
    assert node_place(SECOND) == NodePlace(1, 2, "job-master-0", 23456)


def test_world_size_counts_processes_if_the_operator_says_how_many_a_node_has() -> None:
    eight_each = AT | {"RANK": "1", "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}
    found = node_place(eight_each | {"PET_NODE_RANK": "1", "PET_NNODES": "2"})
    assert found == NodePlace(1, 2, "job-master-0", 23456)


def test_a_trainjob_names_node_0_for_torchrun_alone() -> None:
    for_torchrun = {
        "PET_NODE_RANK": "2",
        "PET_NNODES": "3",
        "PET_MASTER_ADDR": "node-0",
        "PET_MASTER_PORT": "29400",
    }
    assert node_place(for_torchrun) == NodePlace(2, 3, "node-0", 29400)


def test_torchrun_starts_one_process_a_node_and_keeps_its_port() -> None:
    torchrun = AT | {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    assert node_place(torchrun) == NodePlace(1, 2, "job-master-0", 23457)


def test_options_count_before_the_environment() -> None:
    found = node_place(SECOND, rank=3, nodes=4, master="[fd00::1]:7000")
    assert found == NodePlace(3, 4, "fd00::1", 7000)
    assert node_place(SECOND, rank=0, nodes=4).master == "job-master-0"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (AT | {"RANK": "2", "WORLD_SIZE": "2"}, "rank of this node is 2, but there are 2 nodes"),
        (AT | {"RANK": "0", "WORLD_SIZE": "0"}, "there are 0 nodes"),
        (AT | {"RANK": "1"}, "has RANK, but no WORLD_SIZE"),
        (AT | {"WORLD_SIZE": "2"}, "has WORLD_SIZE, but no RANK"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "no MASTER_ADDR"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "no MASTER_PORT"),
        (SECOND | {"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        (SECOND | {"MASTER_PORT": "70000"}, "between 1 and 65535"),
        (SECOND | {"RANK": "-1"}, "RANK='-1' is not a whole number"),
        (AT | {"PET_NODE_RANK": "0", "PET_NNODES": "1:4"}, "no fixed number of nodes"),
        (AT | {"PET_NNODES": "2"}, "no PET_NODE_RANK"),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_refused(
    environ: dict[str, str], said: str
) -> None:
    with pytest.raises(BadInput) as refused:
        node_place(environ)
    assert said in str(refused.value)
    assert "--node-rank" in str(refused.value)  # the remedy


@pytest.mark.parametrize("master", ["a", "a:", ":1", "a:0", "a:x", "a:70000"])
def test_a_master_is_a_host_and_a_port(master: str) -> None:
    with pytest.raises(BadInput, match="HOST:PORT"):
        node_place({}, rank=0, nodes=2, master=master)


def test_rank_and_number_of_nodes_are_given_together() -> None:
    with pytest.raises(BadInput, match="--node-rank is given without --nodes"):
        node_place({}, rank=0)
    with pytest.raises(BadInput, match="--nodes is given without --node-rank"):
        node_place({}, nodes=2)
