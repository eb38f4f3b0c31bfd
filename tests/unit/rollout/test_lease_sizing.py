"""The engine is kept full by the samples that are not finished, not by the groups they belong
to."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import EngineStats
from rollout_worker.held_tasks import HeldTasks, Stage
from rollout_worker.tasks.task_runner import tasks_wanted
from rollout_worker.worker_report import EngineRates
from testbed.patience import patient
from tests.fakes.engine import FakeEngine
from tests.fixtures.chat_model import make_chat_model
from tests.fixtures.environment_fixture import lease_of, staged

GROUP = 8


def leased(held: HeldTasks, number: int) -> str:
    """A task of GROUP samples is held; returns its request id."""
    ref = common_pb2.TaskRef(task_id=f"t{number}", attempt=1)
    task = held.add(rollout_pb2.Lease(task=ref, group_size=GROUP))
    assert task is not None
    return task.request_id


def wanted(held: HeldTasks, slots: int) -> int:
    return tasks_wanted(
        slots=slots,
        group_size=GROUP,
        generating=held.unfinished(),
        sequences_per_s=0.0,
        round_trip_s=0.01,
        unsent=0,
    )


def test_one_long_sample_of_a_group_takes_one_slot_and_a_free_slot_is_not_left_to_gather() -> None:
    held = HeldTasks()
    long_ones = [leased(held, number) for number in range(4)]
    assert wanted(held, slots=32) == 0, "all slots in use"
    for request_id in long_ones:
        for _ in range(GROUP - 1):
            held.completion_finished(request_id)
            assert wanted(held, slots=32) > 0
    assert held.unfinished() == 4
    assert wanted(held, slots=32) == 4


def test_samples_are_counted_once_and_only_while_they_are_made() -> None:
    held = HeldTasks()
    request_id = leased(held, 0)
    held.completion_finished("verification")
    held.completion_finished(f"{request_id}#0.1")
    assert held.unfinished() == GROUP, "of other requests"
    for _ in range(GROUP + 1):
        held.completion_finished(request_id)
    assert held.unfinished() == 0
    leased(held, 1)
    next(task for task in held if task.lease.task.task_id == "t1").stage = Stage.SCORING
    assert held.unfinished() == 0


def test_occupancy_is_the_mean_of_what_the_slots_held() -> None:
    class Counted(FakeEngine):
        in_use = 0

        def stats(self) -> EngineStats:
            return EngineStats(running=self.in_use)

    engine = Counted()
    gauges = EngineRates(engine, slots=8)
    assert gauges.read()["slot_occupancy"] == 0.0
    engine.in_use = 8
    assert gauges.read()["slot_occupancy"] == 0.5
    engine.in_use = 2
    assert gauges.read()["slot_occupancy"] == pytest.approx(10 / 24)


async def test_an_environment_that_has_ended_frees_its_slot_before_the_others(
    tmp_path: Path,
) -> None:
    over: list[str] = []
    first_over, may_end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    async def one_is_long(task: Any, sample: Any) -> float:
        await sample(task.prompt)
        if task.index:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(may_end.wait(), loop))
        return 1.0

    def tell(request_id: str) -> None:
        over.append(request_id)
        first_over.set()

    async with staged(make_chat_model(tmp_path), one_is_long, lambda prompt: "a") as stage:
        stage.engine.completion_finished = tell
        group = asyncio.create_task(stage.produce(lease_of()))
        async with asyncio.timeout(patient(20)):
            await first_over.wait()
        assert over == ["t0/1"] and not group.done()
        may_end.set()
        assert isinstance(await group, rollout_pb2.Group)
        assert over == ["t0/1"] * 2
