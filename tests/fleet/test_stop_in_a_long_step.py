"""A stop in the middle of a step that takes longer than the stop may."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_step_that_takes_longer_than_a_stop_is_left_for_a_checkpoint(tmp_path: Path) -> None:
    config = write_run(
        tmp_path,
        # Some thousand micro-batches of one short row each.
        train={"steps": 1000, "groups_per_step": 256, "tokens_per_microbatch": 16}
        | {"checkpoint_every": 1000, "eval_every": 1000, "skip_zero_advantage": False},
        fleet={"policy": 2, "rollout": 1, "stop_s": 8.0},
        rollout={"group_size": 16},
    )
    up = Up(config, tmp_path / "run")
    try:
        up.until(lambda: up.step() >= 1, 300)
        up.until(lambda: any("computing" in w["activity"] for w in up.status()["workers"]), 200)
        before = up.step()
        up.process.send_signal(signal.SIGINT)
        assert up.wait(120) == 130, up.said()
        assert up.alive() == []
        faults = [e["text"] for e in up.events() if e.get("severity") in ("warning", "error")]
        assert faults == []
        saved = [e["step"] for e in up.events("CheckpointRecorded")]
        assert saved and saved[-1] >= before
        assert up.events("RunSuspended")[-1]["checkpoint_step"] == saved[-1]
    finally:
        up.close()
