"""The first Ctrl-C of `paceline up` while no controller answers, or none leads yet."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.rpc.client import ControlPlaneUnavailable
from paceline.supervisor import up
from paceline.supervisor.up import LocalRun
from paceline.v1 import admin_pb2


class Stop:
    overdue = True

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def ask(self) -> None:
        pass


async def silent(*_: object) -> None:
    raise ControlPlaneUnavailable("no controller answers")


@pytest.fixture
async def run(tmp_path: Path) -> LocalRun:
    config: Any = SimpleNamespace(fleet=SimpleNamespace(stop_s=1.0))
    console: Any = SimpleNamespace(note=lambda _: None)
    return LocalRun(config, tmp_path, console)


async def interrupted(run: LocalRun) -> tuple[str, str]:
    run._interrupted.set_result(None)
    failed = asyncio.get_running_loop().create_future()
    fleet: Any = SimpleNamespace(failed=failed, record=SimpleNamespace(redis=[]))
    control: Any = None
    async with asyncio.timeout(60.0):
        return await run._watch(fleet, control)


async def test_a_stop_begins_though_no_controller_answers(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "TimedStop", Stop)
    monkeypatch.setattr(up, "leader_status", silent)
    run._status = admin_pb2.StatusReply(phase="open")  # a controller has answered before
    assert await interrupted(run) == ("interrupted", "interrupted")


async def test_a_stop_waits_for_nothing_while_the_data_set_is_opened(
    run: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stop, "overdue", False)
    monkeypatch.setattr(up, "TimedStop", Stop)
    monkeypatch.setattr(up, "leader_status", silent)
    run._status = admin_pb2.StatusReply(phase="none")
    assert await interrupted(run) == ("interrupted", "interrupted")
