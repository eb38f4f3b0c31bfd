"""Every worker has one place, the same on every node's account, and no two share a GPU."""

import re
from collections.abc import Sequence

import pytest

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.v1 import admin_pb2
from paceline_launcher.launch.node_workers import NodeWorkers, wanted_on_nodes
from paceline_launcher.node_placement import (
    Placement,
    WorkerPlace,
    gpus_of_worker,
    nodes_needed,
)
from tests.fixtures.configs import config_of
from tests.fixtures.golden import Golden

GOLDEN = Golden("placements")


def placed(config: Config, nodes: int, gpus: int = 0) -> list[dict[str, tuple[int, ...]]]:
    found = Placement(config, nodes, gpus)
    return [{n: p.gpus for n, p in found.on(node).items()} for node in range(nodes)]


def told(case: str) -> str:
    """Who is on which node, with the numbers of its GPUs and, of a replica on several nodes, of its
    ranks."""
    fleet, _, where = case.partition(" on ")
    nodes, gpus = map(int, re.findall(r"\d+", where))
    counts = {name: int(count) for name, count in (word.split("=") for word in fleet.split())}
    engine = {"engine": "vllm", "tensor_parallel": counts.pop("tensor_parallel", 1)}
    config = config_of(fleet=counts, rollout=engine)
    try:
        found = Placement(config, nodes, gpus)
    except BadInput as error:
        return f"refused: {error}"
    lines = [f"{nodes_needed(config, gpus)} nodes are needed"]
    for node in range(nodes):
        here = [f"{name} {list(place.gpus)}" for name, place in found.on(node).items()]
        here += [f"{n} ranks {list(ranks)}" for n, ranks in found.ranks_on(node).items()]
        lines.append(f"node {node}: {', '.join(here)}")
    return "\n".join(lines)


@pytest.mark.parametrize("case", GOLDEN.cases)
def test_policy_replicas_come_first_and_too_few_gpus_are_said_with_what_is_needed(
    case: str,
) -> None:
    """What is left of a replica's last node is given out."""
    GOLDEN.check(case, told(case))


def test_replicas_beyond_those_of_the_fleet_take_nodes_that_are_wholly_free() -> None:
    config = config_of(fleet={"policy": 1, "policy_ranks": 4, "rollout": 1})
    found = Placement(config, 6, 2)
    assert found.of("policy", 1) == WorkerPlace(3, (0, 1), (WorkerPlace(4, (0, 1)),))
    assert found.of("policy", 2) is None
    assert found.ranks_on(4, beyond=[1]) == {"policy-1": range(2, 4)}


@pytest.mark.parametrize("gpus", [0, 2])
def test_pairs_that_take_turns_are_on_one_node_and_its_same_gpus(gpus: int) -> None:
    fleet = {"policy": 3, "rollout": 3, "scorers": 4, "sharing": "turns"}
    scorers = {"rm": {"kind": "reward_model", "path": "m"}}
    config = config_of(fleet=fleet, scorers=scorers)
    found = Placement(config, 2, gpus)
    for index in range(5):
        assert found.of("scorer:rm", index) == found.of("policy", index % 3)
    for index in range(4):  # the last pair is beyond those of the fleet
        place = found.of("policy", index)
        assert place is not None and found.of("rollout", index) == place
    named = NodeWorkers(config, placement=found, node=0, gpus=("A", "B"))
    running = ["policy-0", "rollout-0", "policy-1", "rollout-1"]
    if gpus:
        assert nodes_needed(config, gpus) == 2
        assert [named.take(name, running) for name in running] == [("A",), ("A",), ("B",), ("B",)]


def test_a_pair_that_cannot_share_its_gpus_is_refused() -> None:
    fleet = {"policy": 1, "rollout": 1, "sharing": "turns"}
    with pytest.raises(BadInput, match="computes on 2 GPUs and an engine on 1"):
        Placement(config_of(fleet=fleet | {"policy_ranks": 2}), 1, 8)
    engine = {"engine": "vllm", "tensor_parallel": 4}
    with pytest.raises(BadInput, match="4 ranks for nodes of 2 GPUs"):
        Placement(config_of(fleet=fleet | {"policy_ranks": 4}, rollout=engine), 2, 2)


@pytest.mark.parametrize("gpus", [0, 2, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_worker_is_placed_once_and_no_gpu_twice(count: int, gpus: int) -> None:
    for policy, ranks, rollout, parallel in (
        (1, 1, 1, 1),
        (2, 2, 3, 1),
        (1, 4, 4, 2),
        (3, 1, 9, 4),
    ):
        config = config_of(
            fleet={"policy": policy, "policy_ranks": ranks, "rollout": rollout},
            rollout={"engine": "vllm", "tensor_parallel": parallel},
        )
        try:
            nodes = placed(config, count, gpus)
        except BadInput:
            # Not for less than what is needed: first fit may waste what is smaller than a worker.
            need = policy * ranks + rollout * parallel
            assert need > (count * gpus) - count * (max(ranks, parallel) - 1)
            continue
        names = [name for node in nodes for name in node]
        assert sorted(names) == sorted(
            [f"policy-{i}" for i in range(policy)] + [f"rollout-{i}" for i in range(rollout)]
        )
        for node in nodes:
            taken = [gpu for its in node.values() for gpu in its]
            assert len(taken) == len(set(taken))
            assert all(0 <= gpu < gpus for gpu in taken)


def test_gpus_of_a_worker_follow_its_role() -> None:
    judge = {"kind": "judge", "url": "http://h:1/v1", "model": "m"}
    config = config_of(
        fleet={"policy_ranks": 4},
        rollout={
            "engine": "vllm",
            "tensor_parallel": 2,
            "vllm": {"pipeline_parallel_size": 3},
        },
        scorers={"fair": {"kind": "reward_model", "path": "s"}, "far": judge},
        reward={"functions": ["scorer:fair", "scorer:far"]},
    )
    pools = ("policy", "rollout", "scorer:fair", "scorer:far")
    assert [gpus_of_worker(config, pool) for pool in pools] == [4, 6, 1, 0]


def test_a_worker_beyond_those_of_the_fleet_gets_free_gpus_and_never_moves() -> None:
    config = config_of(fleet={"policy": 1, "rollout": 1})
    placement = Placement(config, 2, 2)
    # Node 0 is full; both kinds may grow on node 1, from either end.
    assert placement.of("policy", 1) == WorkerPlace(1, (0,))
    assert placement.of("rollout", 1) == WorkerPlace(1, (1,))
    assert placement.of("rollout", 2) == WorkerPlace(1, (0,))
    assert placement.of("rollout", 3) is None


def test_a_worker_sees_its_own_gpus_alone_by_their_names() -> None:
    config = config_of(fleet={"policy": 1, "policy_ranks": 2, "rollout": 1})
    gpus = ("4", "5", "6", "GPU-7")
    workers = NodeWorkers(config, placement=Placement(config, 1, 4), gpus=gpus)
    assert workers.take("policy-0", ()) == ("4", "5")
    assert workers.take("rollout-0", ("policy-0",)) == ("6",)
    # Policy replicas and other workers may grow towards one another.
    assert workers.take("rollout-1", ("policy-0", "rollout-0")) == ("GPU-7",)
    assert workers.take("rollout-1", ("policy-0", "rollout-0", "rollout-1")) == ("GPU-7",)
    assert not workers.shared
    without = NodeWorkers(config, placement=Placement(config, 1, 0))
    assert without.shared
    assert without.take("policy-0", ()) == ()


def status_of(desired: int, *workers: tuple[str, str]) -> admin_pb2.StatusReply:
    status = admin_pb2.StatusReply(phase="running", desired={"rollout": desired})
    for name, state in workers:
        status.workers.add(worker_id=name, state=state)
    return status


@pytest.mark.parametrize(
    ("desired", "workers", "names"),
    [
        (2, [], [0, 1]),
        # Of those that are alive none is replaced by another number.
        (1, [("rollout-1", "running"), ("rollout-0", "dead")], [1]),
        (2, [("rollout-1", "running"), ("rollout-0", "dead")], [1, 0]),
        # One that leaves is replaced at once, and its number is free once it has gone.
        (2, [("rollout-0", "draining"), ("rollout-1", "running")], [1, 2]),
        (2, [("rollout-0", "stopped"), ("rollout-1", "running")], [1, 0]),
        (1, [("rollout-0", "running"), ("rollout-1", "running")], [0]),
        (1, [("policy-0", "running")], [0]),
    ],
)
def test_all_nodes_agree_which_workers_are_wanted(
    desired: int, workers: Sequence[tuple[str, str]], names: list[int]
) -> None:
    placement = Placement(config_of(fleet={"rollout": 2}), 2)
    assert wanted_on_nodes(status_of(desired, *workers), "rollout", placement) == names


def test_a_worker_that_no_node_has_room_for_is_not_wanted() -> None:
    placement = Placement(config_of(fleet={"policy": 1, "rollout": 2}), 1, 3)
    leaving = [("rollout-0", "draining"), ("rollout-1", "running")]
    assert wanted_on_nodes(status_of(2, *leaving), "rollout", placement) == [1]


def test_each_rank_of_a_replica_on_several_nodes_sees_the_gpus_of_its_own_node() -> None:
    config = config_of(fleet={"policy": 1, "policy_ranks": 3, "rollout": 1})
    placement = Placement(config, 2, 2)
    first, second = (
        NodeWorkers(config, placement=placement, node=node, gpus=("GPU-a", "GPU-b"))
        for node in (0, 1)
    )
    assert first.take("policy-0.1", ("policy-0",)) == ("GPU-a", "GPU-b")
    assert second.take("policy-0.2", ()) == ("GPU-a",)
    assert first.first() == ["policy-0", "policy-0.1"]
    assert second.first() == ["rollout-0", "policy-0.2"]
    assert second.take("rollout-0", ("policy-0.2",)) == ("GPU-b",)
