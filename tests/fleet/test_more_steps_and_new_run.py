"""A finished run that is given more steps, and a new run that begins with its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, write_run

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(600),
]


def test_a_finished_run_does_only_its_new_steps_and_another_begins_with_its_weights(
    tmp_path: Path,
) -> None:
    config = write_run(tmp_path, fleet={"controllers": 1, "policy": 1, "rollout": 1})
    for steps in (2, 4):
        up = Up(config, tmp_path / "run", "--set", f"train.steps={steps}")
        try:
            assert up.wait() == 0, up.said()
        finally:
            up.close()
        # The journal of both sessions: no step was trained again.
        committed = [event["step"] for event in up.events("StepCommitted")]
        assert committed == list(range(1, steps + 1))
        assert up.events("RolledBack") == []
        summary = up.summary()
        assert (summary["status"], summary["steps"]) == ("finished", steps)
        assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)

    new = Up(
        *(config, tmp_path / "new", "--from", str(tmp_path / "run")),
        *("--set", "run.name=new", "--set", "train.steps=2"),
    )
    try:
        assert new.wait() == 0, new.said()
    finally:
        new.close()
    newest = (tmp_path / "run" / "checkpoints" / "step-000004").resolve()  # the link's directory
    assert f"begins with the weights of {newest} (step 4)" in new.said()
    # A ledger of its own: steps, versions and the rows of the data begin anew.
    assert [event["step"] for event in new.events("StepCommitted")] == [1, 2]
    assert new.summary()["samples_trained"] == 2 * 4 * 4
    # Its lineage is in its configuration, and it has trained those weights on: not the model's.
    assert (
        f"initial_checkpoint = {json.dumps(str(newest))}"
        in (new.run_dir / "config.toml").read_text()
    )
    log = (new.run_dir / "logs" / "policy-0.log").read_text()
    assert "began with a checkpoint" in log and str(newest) in log and "of_step=4" in log
