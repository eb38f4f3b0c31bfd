"""Stages of a stop, by its time limit."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.rpc.client import ControlPlaneUnavailable
from paceline.v1 import admin_pb2
from paceline_launcher.launch.watch import LEDGER_S, TimedStop

FINISH = admin_pb2.SUSPEND_STAGE_FINISH_STEP
LEAVE = admin_pb2.SUSPEND_STAGE_LEAVE_STEP
AT_ONCE = admin_pb2.SUSPEND_STAGE_AT_ONCE


class Controller:
    """Records what it was asked for."""

    def __init__(self) -> None:
        self.away = False
        self.asked: list[admin_pb2.SuspendRequest] = []

    async def call(self, method: str, request: Any, timeout_s: float) -> admin_pb2.AdminReply:
        assert method == "AdminService.Suspend"
        self.asked.append(request)
        if self.away:
            raise ControlPlaneUnavailable("an election")
        return admin_pb2.AdminReply(accepted=True)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stop_of(limit_s: float, **options: Any) -> tuple[TimedStop, Controller, Clock]:
    controller, clock = Controller(), Clock()
    stop = TimedStop(controller, limit_s, clock=clock, **options)  # type: ignore[arg-type]
    return stop, controller, clock


async def test_the_step_has_half_of_the_limit_and_the_checkpoint_the_rest() -> None:
    stop, controller, clock = stop_of(60.0)
    for clock.now in (0.0, 1.0, 29.9, 30.0, 59.9, 60.0, 61.0):
        await stop.ask()
    assert [request.stage for request in controller.asked] == [FINISH, LEAVE, AT_ONCE]
    assert len({request.request_id for request in controller.asked}) == 3


async def test_a_stage_is_asked_for_until_a_leader_has_it_under_one_id() -> None:
    stop, controller, clock = stop_of(60.0)
    controller.away = True
    await stop.ask()
    controller.away = False
    for clock.now in (1.0, 2.0):
        await stop.ask()
    first, second = controller.asked
    assert first == second


async def test_a_run_that_is_being_ended_is_hurried_only_when_its_time_is_over() -> None:
    stop, controller, clock = stop_of(60.0, ending=True)
    for clock.now in (0.0, 30.0):
        await stop.ask()
    assert [request.stage for request in controller.asked] == [LEAVE]


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
async def test_a_fleet_without_a_ledger_is_stopped_in_the_end(limit_s: float) -> None:
    stop, _, clock = stop_of(limit_s)
    assert not stop.overdue
    clock.now = limit_s + LEDGER_S
    assert stop.overdue


async def test_no_time_at_all_means_at_once() -> None:
    stop, controller, _ = stop_of(0.0)
    await stop.ask()
    assert [request.stage for request in controller.asked] == [AT_ONCE]
