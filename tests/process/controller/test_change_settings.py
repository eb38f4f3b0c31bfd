"""Settings of a real run change while it runs, when it is continued, and after its last step."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from controller.store.journal_audit import verify
from paceline_launcher.cli import app
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import (
    control_of,
    running_controllers,
    status,
    until,
    working_fleet,
)


async def command(controllers: Controllers, *arguments: str) -> Any:
    """A command's result; it runs an event loop of its own."""
    target = ["--run-dir", str(controllers.run_dir)]
    return await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *target])


async def test_every_replica_uses_a_changed_setting_from_the_same_step_on_across_a_failover(
    tmp_path: Path,
) -> None:
    train = {"lr": 1e-3, "checkpoint_every": 5}
    with running_controllers(tmp_path, 2, train=train) as controllers:
        shutil.copy(controllers.config, controllers.run_dir / "config.toml")
        async with working_fleet(controllers, policies=2) as (policies, rollouts):
            await until(lambda: policies[0].timings.steps >= 2)
            dry = await command(
                controllers, "set", "train.optimizer.lr=5e-4", "--dry-run", "--json"
            )
            assert json.loads(dry.stdout)["changes"][0]["new"] == 5e-4, dry.output
            limits = ["rollout.environment_timeout_s=45", "reward.timeout_s=15"]
            done = await command(controllers, "set", *limits)
            assert done.exit_code == 0, done.output
            await until(
                lambda: any(
                    (r.settings.environment_timeout_s, r.settings.reward_timeout_s) == (45, 15)
                    for r in rollouts
                )
            )
            done = await command(controllers, "set", "train.optimizer.lr=5e-4", "rollout.top_p=0.9")
            assert "train.optimizer.lr 0.001 -> 0.0005" in done.stdout, done.output
            await until(lambda: all(p.rates and p.rates[max(p.rates)] == 5e-4 for p in policies))
            await until(lambda: any(r.settings.top_p == 0.9 for r in rollouts))
            controllers.started[0].kill()
            seen = policies[0].timings.steps
            await until(lambda: all(p.timings.steps > seen + 1 for p in policies))
            assert all(p.rates[max(p.rates)] == 5e-4 for p in policies)
            for step in policies[0].rates.keys() & policies[1].rates.keys():
                assert policies[0].rates[step] == policies[1].rates[step]
            control = control_of(controllers)
            changed = {c.name: (c.old, c.new) for c in (await status(control)).changed}
            assert changed["train.optimizer.lr"] == ("0.001", "0.0005")
            assert changed["rollout.top_p"] == ("1.0", "0.9")
            assert changed["reward.timeout_s"][1] == "15.0"
            assert changed["rollout.environment_timeout_s"][1] == "45.0"
            await control.close()
            shown = await command(controllers, "status")
            assert "train.optimizer.lr 0.001 -> 0.0005" in shown.stdout
        report = verify(controllers.redis_url, "load")
        assert report.ok, report.problems
