"""Leader that is deposed: until it follows the journal again it says so, and tells nothing of the
run."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from controller import replicated_controller
from controller.replicated_controller import READING, Controller
from controller.status import status_head
from controller.store.journal import Deposed
from paceline.observe.projection import Glance
from tests.fixtures.configs import config_of


class Short:
    """A leader whose term ends as soon as it runs."""

    def __init__(self, *_: object) -> None:
        self.long_polls = SimpleNamespace(wake_all=lambda: None)

    async def run(self) -> None:
        raise Deposed("term 2 is over")


def won(monkeypatch: pytest.MonkeyPatch) -> Controller:
    """A controller that has followed the journal and is about to lead."""

    async def catch_up(_: object) -> None:
        pass

    context: Any = SimpleNamespace(
        config=config_of(),
        run_dir=None,
        identity=SimpleNamespace(controller_id="c"),
        clock=SimpleNamespace(monotonic=lambda: 7.0, time=lambda: 7.0),
        stores=SimpleNamespace(journal=None, payloads=None),
        projector=SimpleNamespace(glance=Glance()),
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
    assert status_head(controller).phase == READING
    assert controller.troubled_s == 0.0
