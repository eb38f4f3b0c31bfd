"""A run that is stopped writes a checkpoint, and goes on from its last step."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, write_run

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 100_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_recorded_as_stopped_and_redoes_nothing(
    tmp_path: Path, number: signal.Signals
) -> None:
    policy = 2 if number is signal.SIGINT else 1
    config = write_run(
        tmp_path,
        train={"steps": STEPS, "checkpoint_every": STEPS, "eval_every": STEPS},
        fleet={"policy": policy, "rollout": 1},
    )
    up = Up(config, tmp_path / "run")
    try:
        up.until(lambda: up.step() >= 3)
        up.process.send_signal(number)
        assert up.wait(120) == 130, up.said()
        assert up.alive() == []
        faults = [e["text"] for e in up.events() if e.get("severity") in ("warning", "error")]
        assert faults == []
        assert up.summary()["status"] == "interrupted"
        stopped_at = up.events("StepCommitted")[-1]["step"]
        assert [e["step"] for e in up.events("CheckpointRecorded")] == [stopped_at]
    finally:
        up.close()

    again = Up(config, tmp_path / "run")
    try:
        again.until(lambda: again.step() >= stopped_at + 2)
        assert again.events("RolledBack") == []
        steps = [e["step"] for e in again.events("StepCommitted")]
        assert steps == list(range(1, steps[-1] + 1)), "each step was trained once"
    finally:
        again.close()
