"""A whole fleet of real processes: 1 Redis, 2 controllers, policy replicas and rollout workers.

Where one worker of each role shows the same, there is one: each takes seconds to start."""

import asyncio
from pathlib import Path

import pytest

from paceline.observe.fleet_file import FleetRecord
from paceline.rpc.auth import own_token
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from testbed.fleets.local_run import Up
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def hold_until_they_have_joined(up: Up, workers: set[str]) -> None:
    """So short a run can end before its last worker is up, or before ``paceline pause`` has
    started."""

    async def pause() -> None:
        record = FleetRecord.read(up.run_dir)
        assert record is not None
        where = [process.address for process in record.processes if process.address]
        control = ControlPlane(where, token=own_token(up.run_dir))
        request = admin_pb2.PauseRequest(request_id="all", paused=True)
        await control.call("AdminService.Pause", request, 30.0)
        await control.close()

    up.until(lambda: up.events("TermBegun"))
    asyncio.run(pause())
    up.until(lambda: {e["worker_id"] for e in up.events("WorkerRegistered")} == workers)


def test_a_run_from_start_to_exported_model_scaled_while_it_is_paused(
    start: Start, tmp_path: Path
) -> None:
    sampled = {"path": str(tmp_path / "held_out.jsonl"), "samples": 4, "limit": 5, "every": 6}
    judged = {"best_metric": "sampled/pass@4"}
    small = {"policy": 1, "rollout": 1}
    up = start(**{"fleet": small, "evaluation": judged, "evaluation.sets.sampled": sampled})
    workers = {"policy-0", "rollout-0"}
    hold_until_they_have_joined(up, workers)
    status = up.status()
    assert status["term"] > 0 and status["phase"] == "paused"
    assert {c["state"] for c in status["controllers"]} == {"leader", "standby"}
    assert {w["worker_id"] for w in status["workers"]} == workers
    up.command("scale", "rollout=2")
    up.until(lambda: any(e["worker_id"] == "rollout-1" for e in up.events("WorkerRegistered")))
    up.command("scale", "rollout=1")
    up.until(lambda: any(e["worker_id"] == "rollout-1" for e in up.events("WorkerChanged")))
    up.command("resume")
    assert up.wait() == 0, up.said()
    assert up.assert_sound(steps=6)["samples_trained"] == 6 * 4 * 4
    steps = {row["step"] for row in up.metrics() if row["kind"] == "step"}
    assert steps == set(range(1, 7)), "each was trained once"
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
    up.command("ledger", "verify")
    assert up.alive() == [], "the Redis started for the check was stopped"

    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(up.run_dir / "export")
    AutoTokenizer.from_pretrained(up.run_dir / "export")

    again = start()
    assert again.wait() == 2
    assert "is finished (6 steps)" in again.said()
