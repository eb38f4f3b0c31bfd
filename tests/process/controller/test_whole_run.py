"""A run from its first task to its end; snapshots, trimming, replay and verification of it; and
settings that change meanwhile."""

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from controller.ledger import Ledger
from controller.store.journal import Journal, JournalGap, Position
from controller.store.journal_audit import Report, verify
from controller.store.ledger_follower import LedgerFollower
from controller.store.redis_keys import Keys
from paceline.payloads.redis_payloads import RedisPayloads
from paceline.redis.client import connect
from paceline_launcher.cli import app
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import (
    control_of,
    running_controllers,
    status,
    until,
    working_fleet,
)


async def test_every_group_is_trained_once_and_payloads_go_with_checkpoints(tmp_path: Path) -> None:
    train = {"steps": 12, "checkpoint_every": 5, "max_staleness": 2}
    with running_controllers(tmp_path, 1, train=train) as controllers:
        async with working_fleet(controllers, policies=2, rollouts=2) as (policies, _):
            for policy in policies:
                policy.fetch = True

            async def finished() -> bool:
                return bool((await status(policies[0].control)).phase == "finished")

            await until(finished)
            state = await status(policies[0].control)
            assert state.step == 12 and state.tasks.trained == 48
            trained = Counter(t for p in policies for _, shard in p.trained for t in shard)
            assert len(trained) == 48 and set(trained.values()) == {1}
        report = verify(controllers.redis_url, "load")
        assert report.ok, report.problems
        counts = report.counts
        assert (counts["trained"], counts["lost"], counts["duplicates"]) == (48, 0, 0)
        payloads = RedisPayloads([controllers.redis_url], "load")

        async def gone() -> bool:
            return await payloads.list() == []

        # They stay until a power cut cannot take back the record of their checkpoint.
        await until(gone)
        await payloads.close()

        def steps() -> list[int]:
            lines = (controllers.run_dir / "metrics.jsonl").read_text().splitlines()
            return [json.loads(line)["step"] for line in lines]

        # The files follow the journal by a fraction of a second.
        await until(lambda: len(steps()) >= 12)
        assert steps() == list(range(1, 13))


async def test_snapshot_trimming_and_replay_give_the_live_state(tmp_path: Path) -> None:
    limits = {"snapshot_every": 100}
    with running_controllers(tmp_path, 1, controller=limits) as controllers:
        redis, keys = connect(controllers.redis_url), Keys("load")
        journal = Journal(redis, keys)
        # Sees every entry from the first one on, as it is written.
        live = LedgerFollower(Ledger(checked=True), Position())
        following = True

        async def follow() -> None:
            while following:
                await live.follow(journal, block_ms=5)
            await live.catch_up(journal)

        follower = asyncio.create_task(follow())
        async with working_fleet(controllers, policies=2) as (policies, _):
            await until(lambda: controllers.log().count(" snapshot ") >= 4)
            await until(lambda: policies[0].timings.steps >= 20)
        controllers.started[0].kill()
        following = False
        await follower
        replayed = await LedgerFollower.load(journal)
        assert replayed.snapshot_at and replayed.at == live.at
        assert replayed.ledger.fingerprint() == live.ledger.fingerprint()
        assert live.ledger.check() == []
        assert (await journal.scan("0-0", count=1))[0].at.number > 1
        try:
            await LedgerFollower(Ledger(), Position()).catch_up(journal)
            raise AssertionError("a trimmed journal was read from its beginning")
        except JournalGap:
            pass
        report = verify(controllers.redis_url, "load")
        assert report.ok, report.problems
        _check_coverage(report, controllers.redis_url)
        # A controller that starts now begins at the snapshot and leads on from there.
        await asyncio.to_thread(controllers.start, "controller-1")
        async with working_fleet(controllers) as (policies, _):
            await until(lambda: policies[0].timings.steps >= 2)
        await redis.aclose()


def _check_coverage(report: Report, redis_url: str) -> None:
    """The rows of the trimmed part of the journal are accounted for too."""
    coverage = report.coverage
    assert (coverage.skipped, coverage.twice) == (0, 0)
    assert report.counts["trained"] > 80
    arguments = ["ledger", "verify", "--redis-url", redis_url, "--run", "load"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    body = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert body["coverage"]["rows"] == coverage.rows


async def test_verification_finds_what_was_tampered_with(tmp_path: Path) -> None:
    with running_controllers(tmp_path, 1) as controllers:
        async with working_fleet(controllers) as (policies, _):
            await until(lambda: policies[0].timings.steps >= 3)
        controllers.started[0].kill()
        redis, keys = connect(controllers.redis_url), Keys("load")
        assert verify(controllers.redis_url, "load").ok
        rows = await redis.xrange(keys.journal)
        accepted = next(r for r in rows if b'"GroupAccepted"' in r[1][b"e"])
        await redis.xdel(keys.journal, accepted[0])
        report = verify(controllers.redis_url, "load")
        assert not report.ok and any("follows entry" in line for line in report.problems)
        await redis.aclose()
        assert not verify(controllers.redis_url, "nothing").ok


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
            dry = await command(controllers, "set", "train.optimizer.lr=5e-4", "--dry-run")
            assert "train.optimizer.lr: 0.001 -> 0.0005" in dry.stdout, dry.output
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
