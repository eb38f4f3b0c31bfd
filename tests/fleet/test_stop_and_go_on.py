"""A run that is stopped goes on from its last step, also after a kill of all its processes, is
given more steps at its end, and hands its weights to a new run.

The sessions follow one another in one test: each start of a fleet takes seconds.
"""

import json
import signal
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, write_run

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 100_000
"""Of a run that is to be stopped."""


def stopped(config: Path) -> int:
    """The last step of a run that got SIGTERM, which wrote a checkpoint of it and left nothing
    running."""
    up = Up(config, config.parent / "run")
    try:
        up.until(lambda: up.step() >= 3)
        up.process.send_signal(signal.SIGTERM)
        assert up.wait(120) == 130, up.said()
        faults = [e["text"] for e in up.events() if e.get("severity") in ("warning", "error")]
        assert faults == []
        up.assert_sound("interrupted")
        stopped_at = int(up.events("StepCommitted")[-1]["step"])
        assert [e["step"] for e in up.events("CheckpointRecorded")] == [stopped_at]
    finally:
        up.close()
    return stopped_at


def killed(config: Path, stopped_at: int) -> int:
    """All of the run at once, some steps after it went on. Until then nothing was done again.
    Returns a step that it has not reached."""
    up = Up(config, config.parent / "run")
    try:
        up.until(lambda: up.step() >= stopped_at + 2)
        committed = [event["step"] for event in up.events("StepCommitted")]
        assert committed == list(range(1, len(committed) + 1)), "each step was trained once"
        assert up.events("RolledBack") == []
    finally:
        up.close()
    # The journal is a moment ahead of its file.
    return int(up.events("StepCommitted")[-1]["step"]) + 30


def finished(config: Path, steps: int) -> Up:
    """A session to the end of the run. What it and those before it did is accounted for."""
    up = Up(config, config.parent / "run", "--set", f"train.steps={steps}")
    try:
        assert up.wait() == 0, up.said()
    finally:
        up.close()
    assert {event["step"] for event in up.events("StepCommitted")} == set(range(1, steps + 1))
    summary = up.assert_sound(steps=steps)
    assert summary["samples_trained"] == steps * 4 * 4
    assert summary["controller_failovers"] == 1, "of the kill: at the others all had stopped"
    return up


def test_a_run_goes_on_after_a_stop_a_kill_and_its_end_and_another_begins_with_its_weights(
    tmp_path: Path,
) -> None:
    config = write_run(
        tmp_path,
        train={"steps": STEPS, "checkpoint_every": STEPS, "eval_every": STEPS},
        fleet={"controllers": 1, "policy": 1, "rollout": 1},
    )
    stopped_at = stopped(config)
    end = killed(config, stopped_at)
    up = finished(config, end)
    assert {event["step"] for event in up.events("RolledBack")} == {stopped_at}
    rolled_back = len(up.events("RolledBack"))
    assert len(finished(config, end + 2).events("RolledBack")) == rolled_back

    new = Up(config, tmp_path / "new", "--from", str(tmp_path / "run"), "--set", "run.name=new")
    try:
        new.until(lambda: new.step() >= 1)
        # Two interrupts end it at once.
        new.process.send_signal(signal.SIGINT)
        new.process.send_signal(signal.SIGTERM)
        assert new.wait(60) == 130, new.said()
        assert new.alive() == []
    finally:
        new.close()
    # A ledger of its own: steps, versions and the rows of the data begin anew.
    assert new.events("StepCommitted")[0]["step"] == 1
    # The directory that the link names.
    newest = (tmp_path / "run" / "checkpoints" / f"step-{end + 2:06}").resolve()
    assert f"begins with the weights of {newest}" in new.said()
    # Its lineage is in its configuration, and it has trained those weights on: not the model's.
    assert (
        f"initial_checkpoint = {json.dumps(str(newest))}"
        in (new.run_dir / "config.toml").read_text()
    )
    log = (new.run_dir / "logs" / "policy-0.log").read_text()
    assert "began with a checkpoint" in log and str(newest) in log and f"of_step={end + 2}" in log
