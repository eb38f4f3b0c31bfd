"""Failed epochs are reported until the controller names another one."""

import threading
from types import SimpleNamespace

import pytest

from paceline.mesh.elastic_mesh import MeshError
from paceline.v1 import common_pb2, worker_pb2
from policy_worker import main
from policy_worker.control_plane import PolicyReport
from policy_worker.main import PolicyWorker


class Deaf:
    """A control plane that takes no notice of the first reports of a failure, as in an outage that
    is longer than they are repeated, or where Redis has lost what they changed."""

    def __init__(self, misses: int) -> None:
        self.caller = common_pb2.Caller(worker_id="policy-0", incarnation=1)
        self.mesh = worker_pb2.PolicyMesh(epoch=7)
        self.directive = worker_pb2.Directive(mesh=self.mesh)
        self.misses = misses
        self.said: list[int] = []

    def report_failure(self, epoch: int, detail: str) -> None:
        self.said.append(epoch)
        if len(self.said) > self.misses:
            self.mesh = worker_pb2.PolicyMesh(epoch=8)
            self.directive = worker_pb2.Directive(mesh=self.mesh)

    def wait(self, done) -> None:
        while not done():
            threading.Event().wait(0.01)

    def poke(self) -> None:
        pass


def test_a_failure_is_reported_again_until_another_epoch_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(main, "REPORT_AGAIN_S", 0.05)
    worker = PolicyWorker.__new__(PolicyWorker)
    worker.control = control = Deaf(misses=2)
    worker.worker_report = PolicyReport()
    worker.outlets = SimpleNamespace(serve=lambda: None)
    worker.trainer = SimpleNamespace(abandon=lambda: None)
    worker.epochs = worker.worker_report.epochs
    worker.collective_failed(control.mesh, MeshError("connection reset"))

    def follow() -> None:
        while control.mesh.epoch == 7:
            worker.follow(control.directive)

    turns = threading.Thread(target=follow, daemon=True)
    turns.start()
    turns.join(60)
    assert not turns.is_alive(), "both ends wait for each other"
    assert control.said == [7, 7, 7]
