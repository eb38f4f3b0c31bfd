"""Samples after a checkpoint has covered their payloads, after leaders died, and after the run."""

import asyncio
import json
import shutil
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from paceline_launcher.cli import app
from testbed.fleets.controllers import running_controllers
from testbed.patience import Patience
from tests.fixtures.rest import train

SETTINGS = {
    "train": {"checkpoint_every": 2},
    "fleet": {"lease_ttl_s": 3600.0},
}


def asked(*arguments: str) -> Any:
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.exception
    return json.loads(shown.stdout)


def steps_of(found: Any) -> set[int]:
    return {group["step"] for group in found["groups"] if group["completions"]}


def until_listed(target: list[str], last: int) -> Any:
    """The samples, once those of steps 1 to ``last`` are listed with their completions."""
    patience = Patience(90.0)
    while True:
        found = asked("samples", "--limit", "500", "--sort", "oldest", *target)
        if steps_of(found) >= set(range(1, last + 1)):
            return found
        assert patience.left(), steps_of(found)
        time.sleep(0.2)


def test_no_group_of_a_covered_step_is_lost_with_a_leader_nor_listed_twice(tmp_path: Path) -> None:
    with running_controllers(tmp_path, 2, **SETTINGS) as controllers:
        shutil.copy(controllers.config, controllers.run_dir / "config.toml")
        target = ["--run-dir", str(controllers.run_dir)]
        asyncio.run(train(controllers, 5))
        # Covered by checkpoints, and not lost; of step 5 the payloads are still there.
        until_listed(target, 5)
        # The leader dies with rows in its memory.
        controllers.started[0].kill()
        asyncio.run(train(controllers, 9))
        found = until_listed(target, 9)
        keys = [(group["group_id"], group["attempt"]) for group in found["groups"]]
        assert len(keys) == len(set(keys))
        first = found["groups"][0]
        assert first["completions"][0]["token_count"] > 0 and first["prompt"]
        # The lineage of a prompt: its groups over the epochs.
        row = first["dataset_row"]
        line = asked("samples", "--row", str(row), "--limit", "500", "--sort", "oldest", *target)
        assert {group["dataset_row"] for group in line["groups"]} == {row}
        expected = [g["group_id"] for g in found["groups"] if g["dataset_row"] == row]
        assert [g["group_id"] for g in line["groups"] if g["state"] != "dropped"] == expected
        # A text of one prompt, which has its group's name.
        text = f"PROMPT OF {first['group_id']} "
        told = asked("samples", "--grep", text, *target)
        assert [group["group_id"] for group in told["groups"]] == [first["group_id"]]
        none = CliRunner().invoke(app, ["samples", "--grep", "no such text", *target])
        assert "no such samples" in none.stdout
    # Controllers and Redis are stopped now.
    after = asked("samples", "--limit", "500", "--sort", "oldest", *target)
    assert steps_of(after) >= set(range(1, 9))
    told = asked("samples", "--grep", text, *target)
    assert [(group["group_id"], group["prompt"]) for group in told["groups"]] == [
        (first["group_id"], first["prompt"])
    ]
