"""A whole fleet of real processes: 1 Redis, 2 controllers, policy replicas and rollout workers.

Where one worker of each role shows the same, there is one: each takes seconds to start."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.config.sections.services import RedisConfig
from paceline.observe.fleet_file import FleetRecord
from paceline.redis.server import ensure_redis, stop_redis
from paceline.rpc.auth import own_token
from paceline.rpc.client import ControlPlane
from paceline.rpc.ports import free_ports
from paceline.v1 import admin_pb2
from testbed.fleets.local_run import ROOT, Up, paceline, write_run
from testbed.patience import patient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Start = Callable[..., Up]
SMALL = {"policy": 1, "rollout": 1}
SLOWLY = {"functions": ["testbed.rewards.slow_reward:digit_first_later"]}
"""Some two steps a second: what a test does to the run comes before its end."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Up] = []

    def begin(*options: str, **sections: dict) -> Up:
        config = tmp_path / "run.toml"
        if not config.exists():
            config = write_run(tmp_path, **sections)
        running.append(Up(config, tmp_path / "run", *options))
        return running[-1]

    yield begin
    for up in running:
        up.close()


def assert_sound(up: Up, steps: int) -> None:
    """The run finished, every sample is accounted for, and nothing is left running."""
    summary = up.summary()
    assert summary["status"] == "finished", up.said()
    assert summary["steps"] == steps
    assert summary["samples_lost"] == 0
    assert summary["samples_duplicated"] == 0
    assert summary["ledger_ok"] is True, summary["ledger_problems"]
    assert summary["samples_trained"] == steps * 4 * 4
    steps_seen = [row["step"] for row in up.metrics() if row["kind"] == "step"]
    assert sorted(set(steps_seen)) == list(range(1, steps + 1))
    assert up.alive() == []


def hold_until_they_have_joined(up: Up, workers: set[str]) -> None:
    """So short a run can end before its last worker is up, or before ``paceline pause`` has
    started."""

    async def pause() -> None:
        record = FleetRecord.read(up.run_dir)
        assert record is not None
        where = [process.address for process in record.processes if process.address]
        control = ControlPlane(where, token=own_token(up.run_dir))
        request = admin_pb2.PauseRequest(request_id="all", paused=True)
        assert (await control.call("AdminService.Pause", request, 30.0)).accepted
        await control.close()

    up.until(lambda: up.events("TermBegun"))
    asyncio.run(pause())
    up.until(lambda: {e["worker_id"] for e in up.events("WorkerRegistered")} == workers)


def resume(up: Up) -> None:
    resumed = paceline("resume", "--run-dir", str(up.run_dir))
    assert resumed.returncode == 0, resumed.stderr


def test_a_run_from_start_to_exported_model_scaled_while_it_is_paused(
    start: Start, tmp_path: Path
) -> None:
    sampled = {"path": str(tmp_path / "held_out.jsonl"), "samples": 4, "limit": 5, "every": 6}
    judged = {"best_metric": "sampled/pass@4"}
    up = start(**{"fleet": SMALL, "evaluation": judged, "evaluation.sets.sampled": sampled})
    workers = {"policy-0", "rollout-0"}
    hold_until_they_have_joined(up, workers)
    status = up.status()
    assert status["term"] > 0 and status["phase"] == "paused"
    assert {c["state"] for c in status["controllers"]} == {"leader", "standby"}
    assert {w["worker_id"] for w in status["workers"]} == workers
    where = ("--run-dir", str(up.run_dir))
    assert paceline("scale", "rollout=2", *where).returncode == 0
    up.until(lambda: any(e["worker_id"] == "rollout-1" for e in up.events("WorkerRegistered")))
    assert paceline("scale", "rollout=1", *where).returncode == 0
    up.until(lambda: any(e["worker_id"] == "rollout-1" for e in up.events("WorkerChanged")))
    resume(up)
    assert up.wait() == 0, up.said()
    assert_sound(up, steps=6)
    record = FleetRecord.read(up.run_dir)
    assert record is not None
    surplus = next(p for p in record.processes if p.name == "rollout-1")
    assert (surplus.exit_code, len(surplus.ids)) == (0, 1), "it left by itself and stayed away"

    evaluations = [row for row in up.metrics() if row["kind"] == "eval"]
    assert [row["step"] for row in evaluations] == [0, 3, 6]
    of_both = [row["eval_sampled/count"] for row in evaluations if "eval_sampled/pass@4" in row]
    assert of_both and set(of_both) <= {3, 4, 5}, "those of one version, and most"
    assert all("eval_held_out/reward" in row for row in evaluations)
    chosen = up.events("BestCheckpointChosen")
    assert {event["metric"] for event in chosen} <= {"sampled/pass@4"}
    sets = up.summary()["eval_sets"]
    assert set(sets) == {"held_out", "sampled"} and sets["sampled"]["step"] == 6
    verified = paceline("ledger", "verify", "--run-dir", str(up.run_dir))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert up.alive() == [], "the Redis started for the check was stopped"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(up.run_dir / "export")
    AutoTokenizer.from_pretrained(up.run_dir / "export")

    again = start()
    assert again.wait() == 2
    assert "is finished (6 steps)" in again.said()


@pytest.mark.slow  # in every run: test_fleet_survives.py, test_recorded_run.py
def test_leader_replica_and_rollout_worker_killed_in_one_run(start: Start) -> None:
    up = start(train={"steps": 20, "checkpoint_every": 10, "eval_every": 10}, reward=SLOWLY)
    hold_until_they_have_joined(up, {"policy-0", "policy-1", "rollout-0", "rollout-1"})
    resume(up)
    up.until(lambda: up.step() >= 2)
    first = up.leader()
    up.kill(first)
    up.until(lambda: len(up.events("TermBegun")) >= 2)
    after = up.step()
    up.until(lambda: up.step() > after)
    up.kill("policy-0")
    up.until(lambda: any(e["worker_id"] == "policy-0" for e in up.events("WorkerDied")))
    up.kill("rollout-1")
    assert up.wait() == 0, up.said()
    assert_sound(up, steps=20)
    summary = up.summary()
    assert summary["controller_failovers"] >= 1
    assert summary["mesh_rebuilds"] >= 1
    died = {e["worker_id"] for e in up.events("WorkerDied")}
    assert {"policy-0", "rollout-1"} <= died


def test_two_interrupts_end_it_at_once(start: Start) -> None:
    up = start(train={"steps": 500}, fleet=SMALL)
    up.until(lambda: up.step() >= 1)
    up.process.send_signal(signal.SIGINT)
    up.process.send_signal(signal.SIGTERM)
    assert up.wait(60) == 130, up.said()
    assert up.alive() == []


@pytest.mark.long
def test_everything_killed_at_once_goes_on_with_exact_accounting(start: Start) -> None:
    up = start(train={"steps": 12, "checkpoint_every": 2}, fleet={"controllers": 1, **SMALL})
    up.until(lambda: up.events("CheckpointRecorded"))
    up.close()

    again = start()
    assert again.wait() == 0, again.said()
    assert_sound(again, steps=12)


def test_a_worker_that_cannot_start_ends_the_run_with_its_line(
    start: Start, tmp_path: Path
) -> None:
    write_run(tmp_path, fleet=SMALL)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not weights")
    up = start()
    assert up.wait() == 1
    assert up.summary()["status"] == "failed"
    assert "policy-" in up.summary()["reason"] or "rollout-" in up.summary()["reason"]
    assert "Traceback" not in up.output.read_text()
    assert up.alive() == []


@pytest.mark.slow  # in every run: test_slurm_job.py, with each role a job of its own
def test_every_role_started_by_hand(tmp_path: Path) -> None:
    config = write_run(tmp_path, train={"steps": 2, "eval_every": 2})
    run_dir = tmp_path / "run"
    ports = free_ports("127.0.0.1", 2)
    controllers = ",".join(f"127.0.0.1:{port}" for port in ports)
    common = (str(config), "--controllers", controllers, "--run-dir", str(run_dir))
    commands = {
        "rollout": ("rollout", *common),
        "policy": ("policy", *common, "--id", "trainer"),
        "first": ("controller", *common, "--index", "0"),
        "second": ("controller", *common, "--index", "1"),
    }
    processes = {}
    try:
        with (tmp_path / "out").open("ab") as out:
            for name, arguments in commands.items():
                command = [sys.executable, "-m", "paceline_launcher", *arguments]
                processes[name] = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
            command = [sys.executable, "-m", "paceline_launcher", "wait", *common]
            processes["wait"] = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
        said = tmp_path / "out"
        for name in ("rollout", "policy", "wait"):
            assert processes[name].wait(patient(240)) == 0, said.read_text()
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["status"], summary["steps"], summary["samples_lost"]) == ("finished", 2, 0)
        assert (run_dir / "export" / "config.json").is_file()
        shown = paceline("status", "--json", "--run-dir", str(run_dir))
        status = json.loads(shown.stdout)
        assert status["phase"] == "finished"
        assert {c["address"] for c in status["controllers"]} == set(controllers.split(","))
        assert "trainer" in {w["worker_id"] for w in status["workers"]}
        for name in ("first", "second"):
            processes[name].terminate()
            assert processes[name].wait(patient(60)) == 0, said.read_text()
        # Nobody answers any more: the run's files say how it ended.
        (run_dir / "summary.json").unlink()
        late = paceline("wait", *common)
        assert late.returncode == 0, late.stdout + late.stderr
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
        shown = paceline("ledger", "verify", "--redis-url", redis_url(run_dir), "--run", "tiny")
        assert shown.returncode == 0, shown.stdout + shown.stderr
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
        stop_redis(run_dir)


def redis_url(run_dir: Path) -> str:
    return ensure_redis(run_dir, RedisConfig()).url
