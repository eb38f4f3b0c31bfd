"""The time left, and who waits for whom once nothing moves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from controller.rest.data_flow import bottleneck
from controller.rest.eta import STALLED_S, StepRate
from controller.rest.metric_store import MetricStore
from tests.fixtures.ledgers import Driven


class Index:
    def __init__(self) -> None:
        self.columns = MetricStore()

    async def ask(self, question: Any) -> Any:
        return question(self)


def controller_of(run: Driven, suspects: set[str]) -> Any:
    liveness = SimpleNamespace(suspect=lambda worker_id, _: worker_id in suspects)
    leader = SimpleNamespace(trouble="", liveness=liveness)
    train = SimpleNamespace(max_staleness=1, groups_per_step=4, steps=10)
    config = SimpleNamespace(train=train)
    return SimpleNamespace(leader=leader, state=run.state, config=config)


async def test_an_interruption_says_nothing_of_the_time_left() -> None:
    run, index = Driven(), Index()
    controller = controller_of(run, set())
    pace = StepRate(controller, index)  # type: ignore[arg-type]
    await pace.look()
    assert pace.left_s is None and pace.last_commit_t is None and pace.stalled_s == 0
    now = time.time()
    for step, seconds in ((1, 2.0), (2, 2.0), (3, 30_000.0), (4, 2.5), (5, 99.0)):
        index.columns.append({"step": step, "t": now - 20 + step, "step_s": seconds})
    run.state.versions.step = 4
    await pace.look()
    # Step 5 was undone by a rollback; step 3 waited out a night.
    assert pace.left_s == pytest.approx(6 * 2.25)
    assert pace.last_commit_t == now - 16
    assert 16 <= pace.stalled_s < 60
    run.state.versions.step = 6
    assert pace.stalled_s == 0, "files that are behind were taken for a run that stands"
    run.state.versions.step = 5
    index.columns.append({"step": 5, "t": now, "step_s": STALLED_S})
    await pace.look()
    assert pace.stalled_s == 0


def test_a_fleet_that_is_not_heard_of_does_not_keep_pace() -> None:
    run = Driven()
    run.policy("p0", "p1")
    run.rollout("r0")
    suspects = {"p0"}
    controller = controller_of(run, suspects)
    assert bottleneck(controller, 0.0) == "The first step is under way."
    suspects.add("p1")
    assert bottleneck(controller, 0.0).startswith("Nothing is heard of any policy replica")
    suspects.clear()
    suspects.add("r0")
    assert bottleneck(controller, 0.0).startswith("Nothing is heard of any rollout worker")


def test_a_run_that_stands_says_what_it_waits_for() -> None:
    run = Driven()
    run.policy("p0")
    run.rollout("r0")
    told = bottleneck(controller_of(run, set()), 42.4)
    assert told == (
        "Nothing has been committed for 42 s: the next step waits for groups, 0 of 4 are ready."
    )
    run.fill("r0", 4)
    told = bottleneck(controller_of(run, set()), 42.4)
    assert told == "Nothing has been committed for 42 s: step 1 waits for p0."
