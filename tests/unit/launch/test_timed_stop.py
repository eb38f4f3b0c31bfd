"""Watch over a run: its start, and the stages of a stop, also while no controller answers or none
leads yet."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.rpc.client import ControlPlaneUnavailable
from paceline.v1 import admin_pb2
from paceline_launcher.launch import watch
from paceline_launcher.launch.watch import LEDGER_S, Interrupts, RunWatch, TimedStop
from tests.fakes.admin_control import AdminControl

FINISH = admin_pb2.SUSPEND_STAGE_FINISH_STEP
LEAVE = admin_pb2.SUSPEND_STAGE_LEAVE_STEP
AT_ONCE = admin_pb2.SUSPEND_STAGE_AT_ONCE


ACCEPTED = admin_pb2.AdminReply()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def stop_of(limit_s: float, **options: Any) -> tuple[TimedStop, Any, Clock]:
    controller: Any = AdminControl(Suspend=ACCEPTED)
    clock = Clock()
    return TimedStop(controller, limit_s, clock=clock, **options), controller, clock


async def test_the_step_has_half_of_the_limit_and_the_checkpoint_the_rest() -> None:
    stop, controller, clock = stop_of(60.0)
    for clock.now in (0.0, 1.0, 29.9, 30.0, 59.9, 60.0, 61.0):
        await stop.ask()
    assert [request.stage for request in controller.asked("Suspend")] == [FINISH, LEAVE, AT_ONCE]
    assert len({request.request_id for request in controller.asked("Suspend")}) == 3


async def test_a_stage_is_asked_for_until_a_leader_has_it_under_one_id() -> None:
    stop, controller, clock = stop_of(60.0)
    controller.answers["Suspend"] = ControlPlaneUnavailable("an election")
    await stop.ask()
    controller.answers["Suspend"] = ACCEPTED
    for clock.now in (1.0, 2.0):
        await stop.ask()
    first, second = controller.asked("Suspend")
    assert first == second


async def test_a_run_that_is_being_ended_is_hurried_only_when_its_time_is_over() -> None:
    stop, controller, clock = stop_of(60.0, ending=True)
    for clock.now in (0.0, 30.0):
        await stop.ask()
    assert [request.stage for request in controller.asked("Suspend")] == [LEAVE]


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
async def test_a_fleet_without_a_ledger_is_stopped_in_the_end(limit_s: float) -> None:
    stop, _, clock = stop_of(limit_s)
    assert not stop.overdue
    clock.now = limit_s + LEDGER_S
    assert stop.overdue


async def test_no_time_at_all_means_at_once() -> None:
    stop, controller, _ = stop_of(0.0)
    await stop.ask()
    assert [request.stage for request in controller.asked("Suspend")] == [AT_ONCE]


LOADS = admin_pb2.WhyReply(
    because="loading the model /m", culprit=admin_pb2.Culprit(name="policy-0")
)


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
    control: Any = AdminControl(Why=LOADS)
    fleet: Any = SimpleNamespace(
        failed=failed, reconcile=reconcile, specs=specs, config=config, control=control
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


async def test_a_run_whose_directory_was_replaced_has_failed(
    replies: list[admin_pb2.StatusReply], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run, _ = watch_of(run_dir, nothing)
    run_dir.rename(tmp_path / "away")
    for again in (False, True):
        if again:
            run_dir.mkdir()
            run.fleet.failed.set_result("policy-0 cannot be started: No such file or directory")
        async with asyncio.timeout(60.0):
            status, reason = await run.until_end(nothing())
        assert status == "failed" and f"{run_dir} was removed" in reason


async def test_what_the_first_step_waits_for_is_said_once(
    replies: list[admin_pb2.StatusReply], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A start was silent for up to a minute."""
    monkeypatch.setattr(watch, "START_EVERY_S", 0.0)
    run, _ = watch_of(tmp_path, nothing)
    told: list[str] = []
    run.console.note = told.append  # type: ignore[method-assign, assignment]
    replies += [admin_pb2.StatusReply(phase="waiting", step=step) for step in (0, 0, 1)]
    while replies:
        await run.poll()
    assert told == ["waiting for policy-0, loading the model /m"]


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
