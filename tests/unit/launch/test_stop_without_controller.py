"""The first Ctrl-C of `paceline up` while no controller answers, or none leads yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.rpc.client import ControlPlaneUnavailable
from paceline.v1 import admin_pb2
from paceline_launcher.launch import run as run_module
from paceline_launcher.launch.run import Run


class Stop:
    overdue = True

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def ask(self) -> None:
        pass


async def silent(*_: object) -> None:
    raise ControlPlaneUnavailable("no controller answers")


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    config: Any = SimpleNamespace(fleet=SimpleNamespace(stop_s=1.0))
    console: Any = SimpleNamespace(note=lambda _: None)
    workers: Any = None
    return Run(config, tmp_path, console, workers)


async def interrupted(run: Run) -> tuple[str, str]:
    run._interrupts.take()
    failed = asyncio.get_running_loop().create_future()
    fleet: Any = SimpleNamespace(failed=failed, record=SimpleNamespace(redis=[]))
    control: Any = None
    async with asyncio.timeout(60.0):
        return await run._watch(fleet, control)


async def test_a_stop_begins_though_no_controller_answers(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "TimedStop", Stop)
    monkeypatch.setattr(run_module, "leader_status", silent)
    run._status = admin_pb2.StatusReply(phase="running")  # a controller has answered before
    run._begun = True
    assert await interrupted(run) == ("interrupted", "interrupted")


@pytest.mark.parametrize(
    ("terms", "waits"),
    [([0], False), ([3], True), ([3, 0], True)],
    ids=["the data set is being opened", "a leader leads", "the journal is read again"],
)
async def test_a_stop_waits_for_nothing_only_if_no_leader_ever_had_a_term(
    run: Run, monkeypatch: pytest.MonkeyPatch, terms: list[int], waits: bool
) -> None:
    replies = [admin_pb2.StatusReply(phase="waiting", term=term) for term in terms]

    async def status(*_: object) -> admin_pb2.StatusReply:
        return replies.pop(0)

    monkeypatch.setattr(Stop, "overdue", False)
    monkeypatch.setattr(run_module, "TimedStop", Stop)
    monkeypatch.setattr(run_module, "leader_status", status)
    run.console.show = lambda _: None  # type: ignore[method-assign]
    run._interrupts.take()

    async def reconcile(_: object) -> None:
        pass

    fleet: Any = SimpleNamespace(reconcile=reconcile)
    control: Any = None
    while replies:
        assert await run._poll(fleet, control) is None
    assert run._must_stop_now() is not waits
