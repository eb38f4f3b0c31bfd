"""The end of a run, as one policy replica sees it."""

import threading
from types import SimpleNamespace

from paceline.v1 import policy_pb2, worker_pb2
from policy_worker.control_plane import PolicyReport
from policy_worker.main import PolicyWorker


class StoppedWhileAsking:
    """A control plane on which STOPPED arrives during NextPlan, just before its answer."""

    def __init__(self) -> None:
        self.directive = worker_pb2.Directive(lifecycle=worker_pb2.LIFECYCLE_RUNNING)
        self.caller = None
        self.stopped = False

    def call(self, method, request, over):
        self.directive = worker_pb2.Directive(lifecycle=worker_pb2.LIFECYCLE_STOPPED)
        self.stopped = True
        return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_FINISHED)

    def wait(self, done) -> None:
        while not done():
            threading.Event().wait(0.01)


def test_stopped_that_overtakes_the_answer_finished_is_not_slept_through():
    worker = PolicyWorker.__new__(PolicyWorker)
    worker.control = StoppedWhileAsking()
    worker.worker_report = PolicyReport()
    worker.outlets = SimpleNamespace(checkpoint_due=lambda: False)
    worker.trainer = SimpleNamespace(state=SimpleNamespace(step=3, version=3))
    worker.followed = worker.control.directive
    worker.idle_since = 0.0
    turn = threading.Thread(target=worker.next_plan, args=(1,), daemon=True)
    turn.start()
    turn.join(60)
    assert not turn.is_alive()
