"""A run over two sources whose length is given in epochs: its steps, its end, and its proof after a
failover."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from controller.store.journal_audit import verify
from testbed.fleets.controllers import control_of, running_controllers, status, until, working_fleet
from tests.process.controller.test_change_settings import command


def write(path: Path, count: int, field: str) -> str:
    path.write_text(
        "".join(json.dumps({field: f"s{n}=", "answer": "x"}) + "\n" for n in range(count))
    )
    return str(path)


@pytest.mark.long
async def test_a_run_of_epochs_over_two_sources_ends_after_the_derived_steps(
    tmp_path: Path,
) -> None:
    sources = {
        "small": {"path": write(tmp_path / "small.jsonl", 10, "prompt"), "weight": 1},
        "large": {
            "path": write(tmp_path / "large.jsonl", 90, "task"),
            "weight": 3,
            "prompt_field": "task",
        },
    }
    data = {"path": "none", "sources": sources}
    train = {"steps": "none", "epochs": 1, "checkpoint_every": 5}
    with running_controllers(tmp_path, 2, data=data, train=train) as controllers:
        (controllers.run_dir / "config.toml").write_text(controllers.config.read_text())
        control = control_of(controllers)
        async with working_fleet(controllers, policies=2) as (policies, _):
            await until(lambda: policies[0].timings.steps >= 3)
            assert (await status(control)).total_steps == 25
            refused = await command(controllers, "set", "train.steps=30")
            assert "train.steps and train.epochs are both set" in str(refused.exception)
            changed = await command(controllers, "set", "train.epochs=1.5")
            assert changed.exit_code == 0, changed.output
            assert (await status(control)).total_steps == 38
            controllers.started[0].kill()

            async def finished() -> bool:
                return (await status(control)).phase == "finished"

            await until(finished, 120.0)
            assert (await status(control)).step == 38
        report = await asyncio.to_thread(verify, controllers.redis_url, "load")
    assert report.ok, report.problems
    assert report.counts["duplicates"] == report.counts["lost"] == 0
    epochs = {name: [e for e in report.coverage.epochs if e.source == name] for name in sources}
    assert sum(e.trained for found in epochs.values() for e in found) == 38 * 4
    # A weight of a quarter visits the small source more often than the large one.
    assert len(epochs["small"]) >= 3 and len(epochs["large"]) <= 2
