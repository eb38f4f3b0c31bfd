"""Journals of other releases: one of this format is read, one of another is refused in one line and
never written to."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from controller.store.journal import FORMAT, ForeignFormat, Journal, LedgerSnapshot, Position
from controller.store.journal_audit import verify
from controller.store.ledger_follower import LedgerFollower
from controller.store.redis_keys import Keys
from paceline.errors import BadInput
from paceline.redis.client import connect
from paceline_launcher.cli import app
from testbed.fleets.controller_processes import write_config
from testbed.patience import patient

KEYS = Keys("load")
REMEDY = "Finish the run with the release that wrote it, or start a new run with --fresh"


@pytest.fixture
async def redis(url: str) -> Any:
    """With the journal of a release whose journals had no number yet."""
    client = connect(url)
    await client.flushdb()
    events = [{"type": "StepDealt", "step": 1, "round": 2, "mesh_epoch": 3}]
    entry = json.dumps({"term": 7, "t": 1.0, "events": events})
    position = await client.xadd(KEYS.journal, {"n": 1, "b": "old", "e": entry})
    head = {"batch": "old", "position": position, "n": 1, "term": 7}
    await client.hset(KEYS.head, mapping=head)
    await client.set(KEYS.term, 7)
    yield client
    await client.aclose()


async def contents(redis: Any) -> Any:
    return [
        await redis.xrange(KEYS.journal),
        await redis.hgetall(KEYS.head),
        await redis.get(KEYS.snapshot),
    ]


async def test_neither_a_leader_nor_a_standby_reads_or_writes_it(redis: Any) -> None:
    before = await contents(redis)
    journal = Journal(redis, KEYS)
    with pytest.raises(ForeignFormat, match=REMEDY):
        await LedgerFollower.load(journal)
    at = Position(before[1][b"position"].decode(), 1, "old")
    with pytest.raises(ForeignFormat, match=f"format 1, and this release reads format {FORMAT}"):
        await journal.append(at, term=7, batch="new", t=2.0, events=[])
    assert await contents(redis) == before
    await redis.hset(KEYS.head, "format", FORMAT + 1)
    with pytest.raises(ForeignFormat, match=f"has format {FORMAT + 1}"):
        await LedgerFollower.load(journal)


async def test_a_journal_and_a_snapshot_of_this_release_are_read(redis: Any) -> None:
    await redis.flushdb()
    await redis.set(KEYS.term, 7)
    journal = Journal(redis, KEYS)
    at = await journal.append(Position(), term=7, batch="one", t=1.0, events=[])
    empty = LedgerFollower.of_snapshot(None).ledger.to_snapshot()
    await journal.save_snapshot(LedgerSnapshot(at, empty, 1.0), term=7, trim_before="")
    assert (await LedgerFollower.load(journal)).at == at
    stored = json.loads(await redis.get(KEYS.snapshot))
    del stored["format"]
    await redis.set(KEYS.snapshot, json.dumps(stored))
    with pytest.raises(ForeignFormat):
        await LedgerFollower.load(journal)


async def test_verify_says_so_with_exit_status_2(redis: Any, url: str, tmp_path: Path) -> None:
    before = await contents(redis)
    with pytest.raises(ForeignFormat, match=REMEDY):
        verify(url, "load")
    # A setting that this release does not know is no reason to hide the journal's format.
    config = f'[run]\nname = "load"\n[redis]\nurl = "{url}"\n[rollout]\nspeculative = true\n'
    (tmp_path / "config.toml").write_text(config)
    for arguments in (["--redis-url", url, "--run", "load"], ["--run-dir", str(tmp_path)]):
        result = CliRunner().invoke(app, ["ledger", "verify", *arguments])
        assert isinstance(result.exception, BadInput) and result.exception.exit_status == 2
        assert REMEDY in str(result.exception)
    assert await contents(redis) == before


async def test_a_controller_does_not_start_on_it(redis: Any, url: str, tmp_path: Path) -> None:
    before = await contents(redis)
    config = write_config(tmp_path, redis={"url": url})
    command = [sys.executable, "-m", "controller", str(config), "--id", "controller-0"]
    command += ["--run-dir", str(tmp_path / "run")]
    ended = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=patient(60)
    )
    assert ended.returncode == 2, ended.stderr
    assert REMEDY in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert await contents(redis) == before
