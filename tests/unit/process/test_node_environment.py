"""Environments of jobs are taken as launchers set them, or refused with a remedy before anything
starts."""

import pytest

from paceline.errors import BadInput
from paceline.process.torchrun_environment import TorchrunPlace, torchrun_place, without_place
from paceline_launcher.launch.job import NodePlace, node_place

AT = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
SECOND = AT | {"RANK": "1", "WORLD_SIZE": "2"}


TORCHRUN = {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
TRAINJOB = {
    "PET_NODE_RANK": "2",
    "PET_NNODES": "3",
    "PET_MASTER_ADDR": "node-0",
    "PET_MASTER_PORT": "29400",
}
ALONE = NodePlace(0, 1, "127.0.0.1", 0)
PLACES = {
    "none": ({"PATH": "/bin"}, {}, ALONE),
    "left over from something else": (AT, {}, ALONE),
    "a PyTorchJob counts nodes": (SECOND, {}, NodePlace(1, 2, "job-master-0", 23456)),
    "an operator that says how many processes a node has": (
        AT
        | {"RANK": "1", "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}
        | {"PET_NODE_RANK": "1", "PET_NNODES": "2"},
        {},
        NodePlace(1, 2, "job-master-0", 23456),
    ),
    "a TrainJob names node 0 for torchrun alone": (TRAINJOB, {}, NodePlace(2, 3, "node-0", 29400)),
    "torchrun keeps its port": (SECOND | TORCHRUN, {}, NodePlace(1, 2, "job-master-0", 23457)),
    "options count before it": (
        SECOND,
        {"rank": 3, "nodes": 4, "master": "[fd00::1]:7000"},
        NodePlace(3, 4, "fd00::1", 7000),
    ),
    "options beside it": (SECOND, {"rank": 0, "nodes": 4}, NodePlace(0, 4, "job-master-0", 23456)),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_place_of_a_node_is_that_of_its_environment_and_options(name: str) -> None:
    environ, options, place = PLACES[name]
    assert node_place(environ, **options) == place


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


WHOLE = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_without_the_variables_there_is_no_place() -> None:
    # These two alone are often left over from something else.
    assert torchrun_place({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, 4) is None
    assert torchrun_place({"RANK": "", "PATH": "/bin"}, 4) is None


def test_the_place_of_a_rank_on_the_second_of_two_hosts() -> None:
    assert torchrun_place(WHOLE, 4) == TorchrunPlace(3, 4, 1, "10.0.0.1", 29500, False, "/")


def test_a_launcher_that_serves_the_store_and_starts_again_is_told_apart() -> None:
    agent = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    place = torchrun_place(WHOLE | agent, 4)
    assert place is not None
    assert (place.agent_store, place.attempt) == (True, "job/2")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *(({name: ""}, f"no {name}. Start every rank with torchrun") for name in sorted(WHOLE)),
        ({"RANK": "4"}, "RANK=4, LOCAL_RANK=1 and WORLD_SIZE=4"),
        ({"RANK": "-1"}, "RANK='-1' is not a whole number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ({"RANK": "0"}, "RANK=0, LOCAL_RANK=1"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536"),
        ({"WORLD_SIZE": "8"}, r"WORLD_SIZE=8, but fleet.policy_ranks = 4.*policy_ranks = 8"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(change: dict, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        torchrun_place(WHOLE | change, 4)


def test_what_a_launcher_of_ours_starts_is_no_rank_of_the_job_around_it() -> None:
    assert without_place(WHOLE | {"PATH": "/bin"}) == {
        "PATH": "/bin",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
