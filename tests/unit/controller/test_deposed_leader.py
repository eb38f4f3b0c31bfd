"""Leader that is deposed: until it follows the journal again it says so, and tells nothing of the
run but why it was late."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from controller import replicated_controller
from controller.replicated_controller import READING, Controller
from controller.status import status_view
from controller.store.journal import Deposed, JournalGap
from paceline.config.schema import Config

WHY = "Redis did not answer for 3.0 s, and the lease has 1 s"


class Short:
    """A leader whose term ends as soon as it runs."""

    end: Exception = Deposed("term 2 is over")

    def __init__(self, *_: object) -> None:
        self.long_polls = SimpleNamespace(wake_all=lambda: None)
        self.renewals = SimpleNamespace(why_late=lambda: WHY)

    async def run(self) -> None:
        raise self.end


def won(monkeypatch: pytest.MonkeyPatch) -> Controller:
    """A controller that has followed the journal and is about to lead."""

    async def catch_up(_: object) -> None:
        pass

    context: Any = SimpleNamespace(
        config=Config.model_validate({"model": {"path": "m"}, "data": {"path": "d"}}),
        run_dir=None,
        identity=SimpleNamespace(controller_id="c"),
        clock=SimpleNamespace(monotonic=lambda: 7.0, time=lambda: 7.0),
        stores=SimpleNamespace(journal=None, payloads=None),
        projector=SimpleNamespace(glance=SimpleNamespace(reward_trouble="")),
    )
    rows: Any = asyncio.get_running_loop().create_future()
    rows.set_result(None)
    replica: Any = SimpleNamespace(catch_up=catch_up)
    monkeypatch.setattr(replicated_controller, "Leader", Short)
    controller = Controller(context)
    controller.trouble = ""
    controller.replica, controller._rows = replica, rows
    return controller


async def test_an_empty_ledger_is_never_told_as_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = won(monkeypatch)
    with pytest.raises(Deposed):
        await controller._lead(2)
    assert status_view(controller).phase == READING
    assert controller.troubled_s == 0.0


@pytest.mark.parametrize("end", [Deposed("term 2 is over"), TimeoutError("Redis"), JournalGap("a")])
async def test_a_leader_says_why_it_was_late_whatever_ended_its_term(
    monkeypatch: pytest.MonkeyPatch, end: Exception
) -> None:
    monkeypatch.setattr(Short, "end", end)
    controller = won(monkeypatch)
    with pytest.raises(type(end)):
        await controller._lead(2)
    assert controller._late == {"term": 2, "why": WHY, "t": 7.0}
