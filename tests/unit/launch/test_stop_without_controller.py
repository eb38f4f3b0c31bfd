"""The first Ctrl-C of `paceline up` while no controller answers, or none leads yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.rpc.client import ControlPlaneUnavailable
from paceline.v1 import admin_pb2
from paceline_launcher.launch import watch
from paceline_launcher.launch.watch import Interrupts, RunWatch


class Stop:
    overdue = True

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def ask(self) -> None:
        pass


def watch_of(run_dir: Path, reconcile: Any) -> tuple[RunWatch, Interrupts]:
    """Watch over a run whose controllers the test answers for."""
    config: Any = SimpleNamespace(fleet=SimpleNamespace(stop_s=1.0))
    console: Any = SimpleNamespace(note=lambda _: None, show=lambda _: None)
    failed = asyncio.get_running_loop().create_future()
    specs = SimpleNamespace(run_dir=run_dir)
    fleet: Any = SimpleNamespace(
        failed=failed, reconcile=reconcile, specs=specs, config=config, control=None
    )
    interrupts = Interrupts(lambda: None, lambda: None)
    return RunWatch(console, fleet, interrupts), interrupts


async def nothing(*_: object) -> None:
    pass


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[admin_pb2.StatusReply]:
    """Answers of the controllers, in turn; afterwards none answers."""
    left: list[admin_pb2.StatusReply] = []

    async def status(*_: object) -> admin_pb2.StatusReply:
        if not left:
            raise ControlPlaneUnavailable("no controller answers")
        return left.pop(0)

    monkeypatch.setattr(watch, "leader_status", status)
    monkeypatch.setattr(watch, "TimedStop", Stop)
    return left


async def test_a_stop_begins_though_no_controller_answers(
    replies: list[admin_pb2.StatusReply], tmp_path: Path
) -> None:
    run, interrupts = watch_of(tmp_path, nothing)
    replies.append(admin_pb2.StatusReply(phase="running", term=1))
    assert await run.poll() is None  # a controller has answered before
    interrupts.take()
    async with asyncio.timeout(60.0):
        assert await run.until_end(nothing()) == ("interrupted", "interrupted")


@pytest.mark.parametrize(
    ("terms", "waits"),
    [([0], False), ([3], True), ([3, 0], True)],
    ids=["the data set is being opened", "a leader leads", "the journal is read again"],
)
async def test_a_stop_waits_for_nothing_only_if_no_leader_ever_had_a_term(
    replies: list[admin_pb2.StatusReply],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    terms: list[int],
    waits: bool,
) -> None:
    monkeypatch.setattr(Stop, "overdue", False)
    run, interrupts = watch_of(tmp_path, nothing)
    interrupts.take()
    replies += [admin_pb2.StatusReply(phase="waiting", term=term) for term in terms]
    while replies:
        assert await run.poll() is None
    assert run.must_stop_now is not waits
