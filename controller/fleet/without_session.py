"""Waits of processes that have no session: they start, or their event loop does not run.

In the memory of each controller, from the processes' own reports every two seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.v1 import worker_pb2

FORGET_S = 10.0
"""A process that still waits reports every two seconds."""
MOST = 4096


@dataclass(slots=True)
class WithoutSession:
    _reports: dict[str, tuple[float, worker_pb2.WaitsReport]] = field(default_factory=dict)
    """By worker id: monotonic seconds of its arrival, and the newest report."""

    def note(self, report: worker_pb2.WaitsReport, now: float) -> None:
        if report.worker_id in self._reports or len(self._reports) < MOST:
            self._reports[report.worker_id] = now, report

    def present(self, now: float) -> dict[str, tuple[float, worker_pb2.WaitsReport]]:
        """Reports of the last seconds by worker id, each with its age in seconds."""
        self._reports = {n: r for n, r in self._reports.items() if now - r[0] < FORGET_S}
        return {name: (now - t, report) for name, (t, report) in self._reports.items()}
