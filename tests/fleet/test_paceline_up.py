"""A whole fleet of real processes: 1 Redis, 2 controllers, policy replicas and rollout workers.

Where one worker of each role shows the same, there is one: each takes seconds to start."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.observe.fleet_file import FleetRecord
from paceline.rpc.auth import own_token
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from testbed.fleets.local_run import Up, paceline, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Start = Callable[..., Up]
SMALL = {"policy": 1, "rollout": 1}
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
