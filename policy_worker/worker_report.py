"""Worker report: the fields of a policy worker's report to the controller.

The training thread writes them and the session's thread reads them; each write is one assignment.
"""

from __future__ import annotations

from paceline.process.worker_resources import Resources
from paceline.v1 import worker_pb2


class PolicyReport:
    """``progress`` rises only if the training thread completed some work. ``busy`` means that it
    has work to do: a worker that is busy without progress is wedged."""

    def __init__(self) -> None:
        self.lifecycle = worker_pb2.LIFECYCLE_STARTING
        self.progress = 0
        self.busy = True
        self.activity = "loading the model"
        self.mesh_epoch = 0
        self._resources = Resources()

    def work(self, activity: str) -> None:
        self.progress += 1
        self.busy, self.activity = True, activity

    def rest(self, activity: str) -> None:
        self.progress += 1
        self.busy, self.activity = False, activity

    def report(self, state_version: int, link_epochs: list[int]) -> worker_pb2.Report:
        return worker_pb2.Report(
            lifecycle=self.lifecycle,
            progress=self.progress,
            busy=self.busy,
            mesh_epoch=self.mesh_epoch,
            state_version=state_version,
            link_epochs=link_epochs,
            gauges=self._resources.read(),
            activity=self.activity,
        )
