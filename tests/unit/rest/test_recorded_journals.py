"""Recorded journals give the replies that they gave when they were recorded, from any source.

The journals are of simulated runs with failovers, a rollback, evaluations, dropped and lost groups.
Record anew with ``python -m tests.unit.rest.test_recorded_journals`` and read the difference.
"""

import asyncio
import json
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from controller.context import ControllerContext
from controller.ledger.codec import encode
from controller.replicated_controller import Controller
from controller.rest.app import Rest
from controller.store.journal import Entry, LedgerSnapshot, Position
from controller.store.ledger_follower import LedgerFollower, coverage_of, totals_of
from paceline.config.schema import Config
from paceline.observe.event_history import position_key
from paceline.observe.projection import Projection, Projector
from paceline.observe.run_files import RunFileWriter
from paceline.redis.leader_lease import LeaderIdentity
from tests.fixtures import configs

FIXTURES = Path(__file__).parents[2] / "fixtures"
REPLIES = FIXTURES / "recorded_replies.json"
JOURNALS: dict[str, list[dict[str, Any]]] = json.loads(
    (FIXTURES / "recorded_journals.json").read_text()
)
METRICS = "reward_mean,loss,step_s,late_share,staleness_mean"
PATHS = (
    *("run", "workers", "steps?since=0", "checkpoints", "faults"),
    *(f"metrics?names={METRICS}", "events?limit=2000&newest=false", "events?kind=faults"),
    *("events?kind=marks", "groups?limit=500", "groups?state=dropped&limit=500"),
)
VOLATILE = {"stalled_s", "bottleneck", "heartbeat_age_s"}
"""Fields that depend on the clock of the machine."""


def entries_of(name: str) -> list[Entry]:
    return [
        Entry(Position(*raw["at"]), raw["term"], raw["t"], raw["events"]) for raw in JOURNALS[name]
    ]


class RecordedJournal:
    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    async def load_snapshot(self) -> None:
        return None

    async def read(self, after: Position, **_: Any) -> list[Entry]:
        return self.entries[after.number : after.number + 50]

    async def scan(self, after: str, *, until: str = "+", **_: Any) -> list[Entry]:
        inside = [e for e in self.entries if position_key(e.at.entry) > position_key(after)]
        return [
            e for e in inside if until == "+" or position_key(e.at.entry) <= position_key(until)
        ][:50]


def config_of(entries: list[Entry]) -> Config:
    spec = entries[0].events[0]["spec"]
    return configs.config_of(
        run={"name": "sim"},
        model={"path": "/"},
        redis={"url": "redis://recorded"},
        rollout={"group_size": spec["group_size"]},
        train={"steps": spec["steps"], "checkpoint_every": spec["checkpoint_every"]},
    )


async def standby_of(entries: list[Entry], run_dir: Path) -> Controller:
    """A controller that has followed these entries."""
    journal: Any = RecordedJournal(entries)
    stores: Any = SimpleNamespace(journal=journal, payloads=None, url="redis://recorded")
    identity = LeaderIdentity("controller-9", "host:1", "host", 1, "nonce")
    context = ControllerContext(config_of(entries), run_dir, identity, stores)
    controller = Controller(context)
    controller.replica = await LedgerFollower.load(journal, context.projector)
    return controller


async def replies_of(controller: Controller) -> dict[str, Any]:
    rest = Rest(controller, token="secret", loopback=True)
    transport = httpx.ASGITransport(app=rest.api)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answers = {path: await client.get(f"/api/v1/{path}") for path in PATHS}
        for answer in answers.values():
            answer.raise_for_status()
        exposition = (await client.get("/metrics")).text
    found = {path: without_clock(answer.json()) for path, answer in answers.items()}
    lines = [x for x in exposition.splitlines() if x.startswith("paceline_")]
    return {**found, "prometheus": lines}


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in VOLATILE}
    return [without_clock(item) for item in value] if isinstance(value, list) else value


def points() -> list[tuple[str, int]]:
    """Journal and number of entries: in the middle of the run, and at its end."""
    return [(name, len(all_) // part) for name, all_ in JOURNALS.items() for part in (2, 1)]


async def replies_at(name: str, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        controller = await standby_of(entries_of(name)[:count], Path(directory))
        return await replies_of(controller)


@pytest.mark.parametrize(("name", "count"), points())
async def test_a_standby_answers_from_a_recorded_journal_as_before(name: str, count: int) -> None:
    expected = json.loads(REPLIES.read_text())[f"{name}/{count}"]
    found = json.loads(json.dumps(await replies_at(name, count)))
    for path in expected:
        assert found[path] == expected[path], path


def listed_of(run: Projection) -> list[Any]:
    """All that follows from listed events alone."""
    state = run.step, run.position, run.resumed, run.status, run.reason, run.took_s
    return [run.history, run.checkpoints, run.held_out, *state]


@pytest.mark.parametrize("name", JOURNALS)
async def test_the_files_of_a_run_tell_the_same_as_its_journal(name: str, tmp_path: Path) -> None:
    live, writer = Projection(), RunFileWriter(tmp_path)
    for entry in entries_of(name):
        live.take(entry.at.entry, entry.t, entry.records)
        for record in entry.records:
            writer.record(entry.at.entry, entry.t, record)
    writer.close()
    read = Projection.read(tmp_path)
    assert listed_of(read) == listed_of(live) and read.evals == live.evals
    assert read.metrics.rows(0, 1000) == live.metrics.rows(0, 1000)
    assert read.totals.faults == live.totals.faults
    assert live.status == "finished" and live.totals.faults.count > 3


@pytest.mark.parametrize("name", JOURNALS)
async def test_a_projection_that_begins_with_files_and_a_snapshot_goes_on_as_the_one_before(
    name: str, tmp_path: Path
) -> None:
    """Files may lack the newest lines, and the snapshot is older than they are."""
    entries = entries_of(name)
    writer, whole = RunFileWriter(tmp_path), Projector(tmp_path / "none", inline=True)
    follower = LedgerFollower.of_snapshot(None)
    follower.projector = whole
    snapshot: LedgerSnapshot | None = None
    for number, entry in enumerate(entries):
        follower.apply([entry])
        if number == len(entries) // 3:
            totals = await whole.ask(lambda run: encode(run.totals))
            written = json.loads(json.dumps([follower.ledger.to_snapshot(), totals]))
            snapshot = LedgerSnapshot(entry.at, written[0], entry.t, written[1])
        if number < len(entries) // 2:
            for record in entry.records:
                writer.record(entry.at.entry, entry.t, record)
    again = Projector(tmp_path, inline=True)
    assert snapshot is not None
    assert not again.begin(partial(totals_of, snapshot), snapshot.at.entry)
    restarted = LedgerFollower.of_snapshot(snapshot)
    restarted.projector = again
    restarted.apply(entries[len(entries) // 3 + 1 :])
    for question in (
        listed_of,
        lambda run: run.metrics.rows(0, 1000),
        lambda run: run.totals.faults,
        lambda run: coverage_of(run.totals, follower.ledger.state),
        lambda run: encode(run.totals),
    ):
        assert await again.ask(question) == await whole.ask(question)
    writer.close()


def record() -> None:
    replies = {f"{name}/{count}": asyncio.run(replies_at(name, count)) for name, count in points()}
    REPLIES.write_text(json.dumps(replies, separators=(",", ":"), sort_keys=True))


if __name__ == "__main__":
    record()
