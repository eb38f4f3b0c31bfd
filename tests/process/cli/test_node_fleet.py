"""Processes of one node of a job: ranks of a replica on several nodes are started together, follow
it, and leave with it."""

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from paceline.v1 import admin_pb2
from paceline_launcher.launch import restarts
from paceline_launcher.launch.child import ChildSpec, ChildSpecs
from paceline_launcher.launch.fleet import Fleet
from paceline_launcher.launch.node_workers import NodeWorkers, publish_point
from paceline_launcher.node_placement import Placement
from testbed.fleets.controllers import until
from tests.fakes.admin_control import AdminControl
from tests.fixtures.configs import config_of

# Its environment is there as soon as the file is.
WAITS = """
import json, os, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
path.with_suffix(".writing").write_text(json.dumps(dict(os.environ)))
path.with_suffix(".writing").rename(path)
time.sleep(600)
"""
ENDS = "import sys; sys.exit({status})"
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Scripts(ChildSpecs):
    """A launcher of small scripts in place of the roles; ``by_name``: of single processes."""

    by_name: ClassVar[dict[str, str]] = {}

    def worker(self, pool: str, index: int) -> ChildSpec:
        return self._scripted(super().worker(pool, index))

    def rank(self, name: str) -> ChildSpec:
        return self._scripted(super().rank(name))

    def _scripted(self, spec: ChildSpec) -> ChildSpec:
        script = self.by_name.get(spec.name, WAITS)
        said = self.run_dir / f"{spec.name}.json"
        return replace(spec, argv=(sys.executable, "-c", script, str(said)), nice=0)


class Ledger(AdminControl):
    """Answers as a leader does."""

    def __init__(self) -> None:
        self.status = admin_pb2.StatusReply(phase="running", desired={"policy": 1, "rollout": 1})
        accepted = admin_pb2.AdminReply()
        super().__init__(GetStatus=self.status, Drain=accepted, ReportFault=None, ReportExit=None)

    @property
    def faults(self) -> list[str]:
        return [f"{request.name} {request.cause}" for request in self.asked("ReportFault")]

    def now(self, **states: str) -> admin_pb2.StatusReply:
        del self.status.workers[:]
        for name, state in states.items():
            self.status.workers.add(worker_id=name.replace("_", "-"), state=state)
        return self.status


CONFIG = config_of(fleet={"policy": 1, "policy_ranks": 4, "rollout": 1, "controllers": 1})


@asynccontextmanager
async def nodes_of(
    run_dir: Path, ledger: Ledger, only: Sequence[int] = (0, 1)
) -> AsyncIterator[list[Fleet]]:
    """Two of three nodes with two GPUs each: the ranks of policy-0 are on nodes 0 and 1, rollout-0
    is on node 2."""
    placement = Placement(CONFIG, 3, 2)
    async with AsyncExitStack() as stack:
        fleets = []
        for node in only:
            workers = NodeWorkers(CONFIG, placement=placement, node=node, gpus=("4", "5"))
            specs = Scripts(CONFIG, run_dir / "c.toml", run_dir, [1], "127.0.0.1")
            home = run_dir / "nodes" / f"node-{node}"
            home.mkdir(parents=True, exist_ok=True)
            control: Any = ledger
            fleet = Fleet(CONFIG, specs, home, control, print, workers)
            stack.push_async_callback(fleet.close)
            fleets.append(fleet)
        yield fleets


@asynccontextmanager
async def second_node(run_dir: Path, **states: str) -> AsyncIterator[tuple[Fleet, Ledger]]:
    """Node 1 alone, which knows where rank 0 of policy-0 is."""
    ledger = Ledger()
    ledger.now(**states)
    publish_point(run_dir, "policy-0", "10.0.0.1")
    async with nodes_of(run_dir, ledger, only=(1,)) as (second,):
        yield second, ledger


def pids(fleet: Fleet) -> dict[str, int]:
    return {child.spec.name: child.pid for child in fleet.running(workers=True)}


async def environment_of(run_dir: Path, name: str) -> dict[str, str]:
    said = run_dir / f"{name}.json"
    await until(said.exists)
    found: dict[str, str] = json.loads(said.read_text())
    return found


async def test_every_rank_is_started_with_its_place_and_meets_the_others_where_rank_0_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A torchrun that has started the node itself.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "7")
    ledger = Ledger()
    async with nodes_of(tmp_path, ledger, only=(1, 0)) as (second, first):
        second.start_workers()
        await second.reconcile(ledger.now())
        assert pids(second) == {}, "nobody knows yet where rank 0 is"
        first.start_workers()
        names = ["policy-0", "policy-0.1", "policy-0.2", "policy-0.3"]
        found = [await environment_of(tmp_path, name) for name in names]
        point = [found[0]["MASTER_ADDR"], found[0]["MASTER_PORT"]]
        assert [[one[name] for name in PLACE] for one in found] == [
            [rank, "4", local, "2", *point]
            for rank, local in (("0", "0"), ("1", "1"), ("2", "0"), ("3", "1"))
        ]
        assert {one["CUDA_VISIBLE_DEVICES"] for one in found} == {"4,5"}
        assert {one["TORCHELASTIC_USE_AGENT_STORE"] for one in found} == {"False"}
        assert pids(second).keys() == {"policy-0.2", "policy-0.3"}


async def test_ranks_follow_when_rank_0_comes_back_on_another_host(tmp_path: Path) -> None:
    async with second_node(tmp_path) as (second, ledger):
        second.start_workers()
        assert (await environment_of(tmp_path, "policy-0.2"))["MASTER_ADDR"] == "10.0.0.1"
        before = pids(second)
        (tmp_path / "policy-0.2.json").unlink()
        await second.reconcile(ledger.now(policy_0="dead"))
        assert pids(second) == before, "rank 0 may come back at the same place"

        publish_point(tmp_path, "policy-0", "10.0.0.2")
        await second.reconcile(ledger.now(policy_0="dead"))
        assert (await environment_of(tmp_path, "policy-0.2"))["MASTER_ADDR"] == "10.0.0.2"


async def test_the_end_of_another_rank_is_no_failure_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank ends with 1 as soon as it has lost the others, each time right after its start if rank
    0 keeps dying."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.0)
    monkeypatch.setattr(Scripts, "by_name", {"policy-0.2": ENDS.format(status=1)})
    async with second_node(tmp_path) as (second, ledger):
        second.start_workers()

        def starts() -> int:
            return sum(len(p.ids) for p in second.record.processes if p.name == "policy-0.2")

        await until(lambda: starts() > 2 * restarts.QUICK_FAILURES)
        assert not second.failed.done()
        assert ledger.faults == []


async def test_a_rank_that_something_kills_is_a_fault_with_a_cause_and_comes_back(
    tmp_path: Path,
) -> None:
    async with second_node(tmp_path) as (second, ledger):
        second.start_workers()
        await until(lambda: "policy-0.3" in pids(second))
        first = pids(second)["policy-0.3"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: pids(second).get("policy-0.3", first) != first)
        await until(lambda: ledger.faults == ["policy-0.3 killed"])


async def test_ranks_end_with_their_replica_and_are_not_started_again(tmp_path: Path) -> None:
    async with second_node(tmp_path) as (second, ledger):
        second.start_workers()
        await until(lambda: len(pids(second)) == 2)
        ledger.status.desired["policy"] = 0
        # Rank 0 tells its ranks itself that it leaves.
        await second.reconcile(ledger.now(policy_0="draining"))
        assert len(pids(second)) == 2
        await second.reconcile(ledger.now(policy_0="stopped"))
        await until(lambda: second.worker_names() == [])


async def test_a_rank_that_ends_well_is_started_again_only_if_its_replica_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripts, "by_name", {"policy-0.2": ENDS.format(status=0)})
    async with second_node(tmp_path, policy_0="stopped") as (second, ledger):
        second.start_workers()
        await until(lambda: second.worker_names() == ["policy-0.3"])
        # The number of the replica is free again, and the replica is wanted.
        monkeypatch.setattr(Scripts, "by_name", {})
        await second.reconcile(ledger.status)
        await until(lambda: "policy-0.2" in pids(second))


async def test_a_node_that_leaves_drains_its_replica_and_starts_nothing_more(
    tmp_path: Path,
) -> None:
    async with second_node(tmp_path) as (second, ledger):
        second.start_workers()
        await until(lambda: len(pids(second)) == 2)
        await second.leave()
        assert {request.worker_id for request in ledger.asked("Drain")} == {"policy-0"}
        for pid in pids(second).values():
            os.kill(pid, signal.SIGTERM)
        await until(lambda: second.worker_names() == [])
        # Nobody wants fewer workers, so the ledger still wants this one.
        await second.reconcile(ledger.now(policy_0="stopped"))
        assert second.worker_names() == []
