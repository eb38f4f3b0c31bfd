"""Turns of a worker: what it says and when, what it hands back, and what it loads."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from paceline.rpc.turn import Turn
from paceline.v1 import worker_pb2
from paceline.weights.weight_transfer import StagedWeights
from rollout_worker.engine.base import EngineStats, ParametersDiffer, SwapFailed
from rollout_worker.held_tasks import HeldTasks, Stage
from rollout_worker.lifecycle import PARTIAL_S
from rollout_worker.turns import DEVICE_TAKEN, Turns
from rollout_worker.weight_loading import LOAD_TRIES, PARITY_TRIES, WeightLoader
from rollout_worker.worker_report import RolloutReport


def seat(grant: int, *, hold: bool) -> worker_pb2.Seat:
    return worker_pb2.Seat(name="seat-0", grant=grant, hold=hold)


def said(turn: Turn) -> tuple[int, bool]:
    return turn.report.grant, turn.report.parked


def test_a_device_is_not_used_again_under_a_grant_that_was_given_back() -> None:
    """Directives may come late, and another worker may have the device by then."""
    turn = Turn()
    assert turn.begins(seat(3, hold=True)) and said(turn) == (3, False)
    assert turn.begins(seat(3, hold=True))  # it goes on
    assert not turn.begins(seat(3, hold=False)) and said(turn) == (3, False)
    turn.ends(seat(3, hold=False))
    assert said(turn) == (3, True)
    assert not turn.begins(seat(3, hold=True)) and said(turn) == (3, True)
    turn.ends(seat(0, hold=False))
    assert said(turn) == (3, True)
    assert turn.begins(seat(5, hold=True)) and said(turn) == (5, False)


def test_a_grant_that_is_asked_for_before_it_was_taken_is_given_back() -> None:
    turn = Turn()
    assert not turn.begins(seat(4, hold=False))
    turn.ends(seat(4, hold=False))
    assert said(turn) == (4, True)


class Worker:
    """A worker whose engine, tasks and session write down what they are asked."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.failures: list[Exception] = []
        """Of the loads that come next."""
        self.engine = SimpleNamespace(version=-1)
        self.engine.park, self.engine.unpark = self.noting("park"), self.noting("unpark")
        self.engine.load_weights = self.load_weights
        self.tasks: Any = Mock(engine=self.engine)
        self.tasks.leave_partial_work = self.noting("partial work")
        self.tasks.hand_back = lambda *what: self.done.append(("back", *what))
        session: Any = SimpleNamespace(poke=lambda: self.done.append(said(self.turns.turn)))
        loop = asyncio.get_running_loop()
        self.lifecycle = Mock(state=worker_pb2.LIFECYCLE_RUNNING)
        self.loading = WeightLoader(session, self.tasks, self.lifecycle, loop, turns=True)
        given: Any = session, self.engine, self.tasks, self.loading
        self.turns = Turns(*given, start=self.noting("start"))

    def noting(self, what: str) -> AsyncMock:
        return AsyncMock(side_effect=lambda *args: self.done.append(what))

    async def load_weights(self, version: int, tensors: object) -> float:
        self.done.append(("load", version))
        if self.failures:
            raise self.failures.pop()
        self.engine.version = version
        return 0.0

    async def told(self, grant: int, *, hold: bool) -> list[Any]:
        """What it does after such a directive; the end of it is a report."""
        self.done.clear()
        self.turns.directed(worker_pb2.Directive(seat=seat(grant, hold=hold)))
        following = asyncio.create_task(self.turns.run())
        for _ in range(50):
            await asyncio.sleep(0)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return [what for what in self.done if what != (0, True)]


@pytest.mark.asyncio
async def test_a_turn_is_reported_before_the_device_is_used_and_after_it_is_free() -> None:
    worker = Worker()
    assert await worker.told(0, hold=False) == [] and not worker.turns.may_compute
    await worker.loading.load(StagedWeights(0, {}))
    await worker.loading.load(StagedWeights(1, {}))
    assert worker.done == [(0, True)], "weights wait on the host"
    begins = await worker.told(1, hold=True)
    assert begins[:2] == [(1, False), "start"] and ("load", 1) in begins
    assert ("load", 0) not in begins and worker.turns.may_compute
    await worker.loading.load(StagedWeights(2, {}))
    assert ("load", 2) in worker.done
    ends = await worker.told(1, hold=False)
    assert ends == ["partial work", ("back", DEVICE_TAKEN, Stage.GENERATING), "park", (1, True)]
    assert not worker.turns.may_compute
    again = await worker.told(7, hold=True)
    assert again[:2] == [(7, False), "unpark"], "the engine is started once"
    assert ("load", 2) in again, "no newer weights came: those it had are loaded again"
    assert set(worker.turns.gauges) == {"park_s", "hand_back_s", "unpark_s", "unpark_load_s"}


@pytest.mark.asyncio
async def test_a_park_waits_longer_for_partial_work_than_a_stop_does() -> None:
    """Nobody ends a worker that parks, and what is not stored is generated twice."""
    worker, stored = Worker(), asyncio.Event()
    await worker.told(1, hold=True)
    loop = asyncio.get_running_loop()
    worker.tasks.leave_partial_work = lambda *_: stored.wait()  # the store is slow
    worker.turns.directed(worker_pb2.Directive(seat=seat(1, hold=False)))
    worker.done.clear()
    following = asyncio.create_task(worker.turns.run())
    loop.call_later(PARTIAL_S + 0.2, stored.set)
    await stored.wait()
    assert not [what for what in worker.done if what == "park"]
    for _ in range(20):
        await asyncio.sleep(0)
    assert "park" in worker.done
    following.cancel()


@pytest.mark.asyncio
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize(
    ("kind", "tries"), [(SwapFailed, LOAD_TRIES), (ParametersDiffer, PARITY_TRIES)]
)
async def test_weights_that_do_not_load_in_a_new_turn_are_tried_again_and_then_the_worker_ends(
    kind: type[Exception], tries: int, lasting: bool
) -> None:
    """No link brings them again: they are here, and nobody else knows that they are missing."""
    worker = Worker()
    await worker.loading.load(StagedWeights(3, {}))
    worker.failures = [kind("no room")] * (tries - (not lasting))
    done = await worker.told(1, hold=True)
    assert done.count(("load", 3)) == tries
    assert worker.lifecycle.engine_failed.called == lasting
    assert worker.turns.may_compute != lasting and (worker.engine.version == 3) != lasting


@pytest.mark.asyncio
async def test_a_switch_that_hangs_is_work_without_progress_and_a_first_start_is_none() -> None:
    """The controller gives up on what is busy without progress; a model may load for long."""
    worker = Worker()
    worker.engine.stats = EngineStats
    worker.tasks.configure_mock(held=HeldTasks(), outbox=Mock(__len__=lambda _: 0, submitted=0))
    worker.tasks.partials.continued_tokens = worker.tasks.round_trip_s = 0.0
    parts: Any = worker.lifecycle, worker.tasks, worker.loading, None
    reports = RolloutReport(*parts, 8, turns=worker.turns)
    said_meanwhile: list[Any] = []

    def during(*_: object) -> None:
        report = reports.message()
        said_meanwhile.append((report.busy, report.activity))

    worker.turns.start.side_effect = during
    worker.engine.park.side_effect = worker.engine.unpark.side_effect = during
    progress = [reports.message().progress]
    for grant, hold in (1, True), (1, False), (2, True), (2, False):
        await worker.told(grant, hold=hold)
        progress.append(reports.message().progress)
        assert not reports.message().busy
    parking = True, "giving the device up"
    assert said_meanwhile == [
        (False, "starting the engine"),
        parking,
        (True, "taking the device"),
        parking,
    ]
    assert progress == sorted(set(progress)), "each switch is progress"
