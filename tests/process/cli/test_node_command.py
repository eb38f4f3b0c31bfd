"""`paceline node` says what it would start, and refuses what node 0 was not started with."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.config.load import load_config, to_toml
from paceline.errors import BadInput
from paceline.rpc.addresses import free_ports
from paceline.rpc.client import RequestRefused
from paceline_launcher.launch import follower as meeting
from paceline_launcher.launch.follower import FollowingNode
from paceline_launcher.launch.job import (
    NodeJob,
    NodePlace,
    RunOutcome,
    read_job,
    read_outcome,
    write_job,
    write_outcome,
)
from paceline_launcher.launch.node_workers import NodeWorkers
from testbed.fleets.local_run import write_run

SECOND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
Node = Callable[..., Any]
JOB = NodeJob("s", "tiny", 2, 0, "digest", ("127.0.0.1:1",))


@pytest.fixture
def node(paceline: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `paceline node` to its end: (config, options, environment of the node)."""

    def run(config: Path, *options: str, **environ: str) -> Any:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PACELINE_TOKEN", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        return paceline("node", str(config), *options)

    return run


def test_every_node_says_what_it_would_start(node: Node, tmp_path: Path) -> None:
    config = write_run(
        tmp_path,
        model={"device": "auto"},
        fleet={"policy": 1, "policy_ranks": 2, "rollout": 2},
    )
    shown = []
    for rank in ("0", "1"):
        here = SECOND | {"RANK": rank, "CUDA_VISIBLE_DEVICES": "4,5"}
        done = node(config, "--run-dir", str(tmp_path / "run"), "--dry-run", "--json", **here)
        assert done.returncode == 0, done.stderr
        shown.append(json.loads(done.stdout))
    assert [one["controllers"] for one in shown] == [2, 0]
    assert [one["redis"] for one in shown] == [True, False]
    assert shown[0]["workers"] == {"policy-0": {"gpus": ["4", "5"]}}
    assert shown[1]["workers"] == {"rollout-0": {"gpus": ["4"]}, "rollout-1": {"gpus": ["5"]}}
    assert not (tmp_path / "run").exists()


def test_a_node_without_node_0_says_so_and_ends(node: Node, tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    here = SECOND | {"MASTER_PORT": str(port)}
    done = node(write_run(tmp_path), "--run-dir", str(tmp_path / "run"), "--wait", "0.5", **here)
    assert done.returncode == 3, done.stderr
    assert f"waiting for node 0 at 127.0.0.1:{port}" in done.stdout
    assert "has not started within 0.5 s" in done.stderr
    assert "--run-dir the same path on a shared file system" in done.stderr


@pytest.fixture
def meet(tmp_path: Path) -> Callable[..., Any]:
    """Meets the node 0 whose files are in ``tmp_path``."""

    def begin(port: int = 1, **own: Any) -> Any:
        place = NodePlace(1, 2, "127.0.0.1", port)
        job, workers = (
            replace(JOB, session="mine", **own),
            cast(NodeWorkers, SimpleNamespace(node=1)),
        )
        (tmp_path / "nodes" / "node-1").mkdir(parents=True, exist_ok=True)
        return asyncio.run(FollowingNode(place, tmp_path, job, 0.0, print, workers).meet())

    return begin


def node_0_has_started(run_dir: Path, **sections: dict[str, Any]) -> None:
    config = load_config(write_run(run_dir, **sections))
    (run_dir / "config.toml").write_text(to_toml(config))
    write_job(run_dir, JOB)


def test_another_token_than_that_of_node_0_is_said(
    meet: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object) -> None:
        raise RequestRefused("UNAUTHENTICATED", "wrong token")

    monkeypatch.setenv("PACELINE_TOKEN", "a-token-of-this-test-alone")
    monkeypatch.setattr(meeting, "leader_status", refuses)
    node_0_has_started(tmp_path)
    with pytest.raises(BadInput, match="refuses this node's token"):
        meet()


def test_a_node_without_a_token_says_so_at_once(
    meet: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)
    node_0_has_started(tmp_path)
    with pytest.raises(BadInput, match="has no token: set PACELINE_TOKEN"):
        meet()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"nodes": 3}, "number of nodes than this node: 2, here 3"),
        ({"gpus": 8}, "--gpus"),
        ({"settings": "other"}, "RUN.toml and --set"),
        ({"run": "other"}, "run.name than this node: tiny, here other"),
    ],
)
def test_a_node_that_was_started_otherwise_is_refused(
    own: dict[str, Any],
    said: str,
    meet: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answers(*_: object) -> None:
        return None

    monkeypatch.setenv("PACELINE_TOKEN", "a-token-of-this-test-alone")
    monkeypatch.setattr(meeting, "leader_status", answers)
    node_0_has_started(tmp_path)
    assert meet().specs.addresses == list(JOB.addresses)
    with pytest.raises(BadInput) as refused:
        meet(**own)
    assert said in str(refused.value)


def test_the_outcome_of_an_earlier_session_is_gone_once_node_0_starts(tmp_path: Path) -> None:
    write_outcome(tmp_path, RunOutcome("before", "failed", 1, "why"))
    write_job(tmp_path, JOB)
    assert read_outcome(tmp_path) is None
    assert read_job(tmp_path) == JOB


@pytest.mark.parametrize("provider", ["ray", "none"])
def test_a_node_whose_workers_others_start_has_the_controllers_alone(
    node: Node, tmp_path: Path, provider: str
) -> None:
    # The GPUs are on other machines.
    config = write_run(tmp_path, model={"device": "cuda"}, fleet={"provider": provider})
    alone = ("--node-rank", "0", "--nodes", "1", "--master", "10.0.0.1:7000")
    done = node(config, "--dry-run", "--json", *alone)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["workers"] == {} and shown["controllers"] == 2 and shown["redis"] is True
    assert shown["master"] == "10.0.0.1:7000"

    done = node(config, "--dry-run", **SECOND)
    assert done.returncode == 2
    assert "start it on one node" in done.stderr
