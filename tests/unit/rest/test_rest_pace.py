"""The time left, and who waits for whom once nothing moves."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.rest.data_flow import STALLED_S, last_commit_t, stalled_s
from controller.status import time_left_s
from paceline.observe.projection import Projector
from tests.fixtures.ledgers import Driven


async def test_an_interruption_says_nothing_of_the_time_left() -> None:
    run, projector = Driven(), Projector(Path("run"), inline=True)
    config = SimpleNamespace(train=SimpleNamespace(steps=10))
    context = SimpleNamespace(projector=projector)
    controller: Any = SimpleNamespace(state=run.state, config=config, context=context)

    def commit(step: int, t: float, step_s: float) -> None:
        metrics = {"reward_mean": 0.5, "step_s": step_s}
        about = {"step": step, "version": step, "metrics": metrics, "t": t, "text": "x"}
        post(t, {"type": "StepCommitted", **about})

    def post(t: float, event: dict[str, Any]) -> None:
        positions.append(f"{len(positions) + 1}-0")
        projector.post(positions[-1], t, [event])

    positions: list[str] = []

    await projector.look()
    assert (
        time_left_s(controller) is None
        and last_commit_t(controller) is None
        and stalled_s(controller) == 0
    )
    now = time.time()
    for step, seconds in ((1, 2.0), (2, 2.0), (3, 30_000.0), (4, 2.5), (5, 99.0)):
        commit(step, now - 20 + step, seconds)
    post(now - 15, {"type": "RolledBack", "step": 4, "from_step": 5, "version": 6, "text": "x"})
    run.state.versions.step = 4
    await projector.look()
    # Step 3 waited out a night.
    assert time_left_s(controller) == pytest.approx(6 * 2.25)
    assert last_commit_t(controller) == now - 16
    assert 16 <= stalled_s(controller) < 60
    run.state.versions.step = 6
    assert stalled_s(controller) == 0, "files that are behind were taken for a run that stands"
    run.state.versions.step = 5
    commit(5, now, STALLED_S)
    await projector.look()
    assert stalled_s(controller) == 0
