"""Waits of a policy worker for its controller: none is slept through, and none is for ever."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.mesh.elastic_mesh import MeshError
from paceline.rpc.turn import Turn
from paceline.v1 import policy_pb2, worker_pb2
from policy_worker import main
from policy_worker.control_plane import PolicyReport
from policy_worker.main import PolicyWorker
from policy_worker.training_steps import TrainingSteps
from tests.fakes.policy_control import ScriptedControl


def worker_of(control: ScriptedControl) -> Any:
    worker: Any = PolicyWorker.__new__(PolicyWorker)
    worker.control, worker.admitted = control, True
    worker.config = SimpleNamespace(takes_turns=False)
    worker.worker_report = PolicyReport()
    worker.epochs = worker.worker_report.epochs
    worker.out = SimpleNamespace(checkpoint_due=lambda: False, serve=lambda: None)
    state = SimpleNamespace(step=3, version=3)
    worker.trainer = SimpleNamespace(state=state, abandon=lambda: None)
    return worker


def assert_ends(turn: Callable[[], object]) -> None:
    thread = threading.Thread(target=turn, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_stopped_that_overtakes_the_answer_finished_is_not_slept_through() -> None:
    def stopped_just_before(request: Any) -> policy_pb2.PlanReply:
        control.directive = worker_pb2.Directive(lifecycle=worker_pb2.LIFECYCLE_STOPPED)
        control.stopped = True
        return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_FINISHED)

    control = ScriptedControl(NextPlan=stopped_just_before)
    worker, followed = worker_of(control), control.directive
    state: Any = (control, worker.trainer, worker.worker_report, worker.out, None, None)
    assert_ends(lambda: TrainingSteps(*state).take(1, followed))


def test_a_replica_that_is_asked_for_its_first_grant_gives_it_back() -> None:
    """Before it has seen that the device was its own: it has loaded nothing."""
    control = ScriptedControl()
    worker = worker_of(control)
    worker.turn, told = Turn(), iter([worker_pb2.Seat(name="h/0", grant=5)])
    worker.next_directive = lambda: next((worker_pb2.Directive(seat=seat) for seat in told), None)
    worker.sleep = lambda directive, activity: True
    assert not worker.first_turn()
    assert worker.worker_report.now["seat"] == worker_pb2.SeatReport(grant=5, parked=True)


class Deaf(ScriptedControl):
    """It takes no notice of the first reports of a failure, as in an outage that is longer than
    they are repeated, or where Redis has lost what they changed."""

    def __init__(self, misses: int) -> None:
        super().__init__()
        self.mesh = worker_pb2.PolicyMesh(epoch=7)
        self.directive = worker_pb2.Directive(mesh=self.mesh)
        self.misses = misses
        self.said: list[int] = []

    def report_failure(self, epoch: int, detail: str) -> None:
        self.said.append(epoch)
        if len(self.said) > self.misses:
            self.mesh = worker_pb2.PolicyMesh(epoch=8)
            self.directive = worker_pb2.Directive(mesh=self.mesh)


def follow(worker: Any, over: Callable[[], object]) -> None:
    def turns() -> None:
        while not over():
            worker.follow(worker.control.directive)

    assert_ends(turns)


def test_a_failure_is_reported_again_until_another_epoch_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main, "REPORT_AGAIN_S", 0.05)
    control = Deaf(misses=2)
    worker = worker_of(control)
    worker.collective_failed(control.mesh, MeshError("connection reset"))
    follow(worker, lambda: control.mesh.epoch != 7)
    assert control.said == [7, 7, 7]


def test_an_epoch_older_than_one_named_before_is_not_formed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis lost the end of the journal, and with it that epoch 7 was over."""
    monkeypatch.setattr(main, "REPORT_AGAIN_S", 0.05)
    control = Deaf(misses=1)
    worker = worker_of(control)
    worker.epochs.wanted = worker.epochs.formed = 8
    joined: list[int] = []
    worker.join = lambda mesh: joined.append(mesh.epoch)
    follow(worker, lambda: joined)
    assert control.said == [7, 7]
    assert joined == [8], "this number names another epoch now"
