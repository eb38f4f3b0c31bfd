"""A run that is stopped writes a checkpoint, goes on from its last step, and accounts for every sample."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, paceline, write_run

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 100_000


def done(up: Up, *command: str) -> None:
    ran = paceline(*command, "--run-dir", str(up.run_dir))
    assert ran.returncode == 0, ran.stderr + up.said()


def pause_and_scale(up: Up) -> None:
    """While it trains: a rollout worker joins a paused run, and leaves it once it trains again."""
    done(up, "pause")
    assert up.status()["phase"] == "paused"
    done(up, "scale", "rollout=2")
    up.until(lambda: any(e["worker_id"] == "rollout-1" for e in up.events("WorkerRegistered")))
    done(up, "resume")
    at = up.step()
    up.until(lambda: up.step() > at)
    done(up, "scale", "rollout=1")
    up.until(lambda: any(e["worker_id"] == "rollout-1" for e in up.events("WorkerChanged")))


def interrupted(config: Path, number: signal.Signals) -> int:
    """The last step of a run that got the signal, which wrote a checkpoint of it and left nothing running."""
    up = Up(config, config.parent / "run")
    try:
        up.until(lambda: up.step() >= 3)
        up.process.send_signal(number)
        assert up.wait(120) == 130, up.said()
        assert up.alive() == []
        faults = [e["text"] for e in up.events() if e.get("severity") in ("warning", "error")]
        assert faults == []
        assert up.summary()["status"] == "interrupted"
        stopped_at = int(up.events("StepCommitted")[-1]["step"])
        assert [e["step"] for e in up.events("CheckpointRecorded")] == [stopped_at]
    finally:
        up.close()
    return stopped_at


def write(where: Path, policy: int) -> Path:
    return write_run(
        where,
        train={"steps": STEPS, "checkpoint_every": STEPS, "eval_every": STEPS},
        fleet={"policy": policy, "rollout": 1},
    )


def test_a_terminated_run_ends_as_one_that_is_interrupted(tmp_path: Path) -> None:
    assert interrupted(write(tmp_path, policy=1), signal.SIGTERM) >= 3


def test_an_interrupted_run_goes_on_to_its_end_and_redoes_nothing(tmp_path: Path) -> None:
    config = write(tmp_path, policy=2)
    stopped_at = interrupted(config, signal.SIGINT)
    again = Up(config, tmp_path / "run")
    try:
        again.until(lambda: again.step() >= stopped_at + 2)
        assert again.events("RolledBack") == []
        pause_and_scale(again)
        done(again, "stop")
        assert again.wait() == 0, again.said()
        steps = [e["step"] for e in again.events("StepCommitted")]
        assert steps == list(range(1, steps[-1] + 1)), "each step was trained once"
        summary = again.summary()
        assert (summary["status"], summary["steps"]) == ("finished", steps[-1])
        assert summary["ledger_ok"] is True, summary["ledger_problems"]
        assert summary["samples_lost"] == summary["samples_duplicated"] == 0
        assert summary["samples_trained"] == steps[-1] * 4 * 4
        assert summary["controller_failovers"] == 0, "all had stopped"
        assert again.alive() == []
    finally:
        again.close()
