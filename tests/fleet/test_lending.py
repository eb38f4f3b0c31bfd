"""Three pairs whose devices are lent, on the CPU, as a user starts them. A wrong split is mended, and
kills inside a loan lose nothing."""

from collections.abc import Iterator

import pytest

from paceline.observe.vocabulary import EventType
from testbed.faults import failpoints
from testbed.fleets.launched_fleet import Event, LaunchedFleet
from testbed.fleets.local_run import paceline
from tests.fixtures.shared import Shared
from tests.fleet.test_turns import assert_one_holder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TRAINS, GENERATES = "policy", "rollout"


class Lending(LaunchedFleet):
    """Generation takes most of a step, and two of three pairs train at first. The pair that changes
    its side is always the second one."""

    def settled(self, limit_s: float = 90.0) -> None:
        """Each seat has a holder of its side that works, and so go steps."""
        self.until(self._works, limit_s)
        self.steps(1)

    def _works(self) -> bool:
        status, living = self.status(), self.workers()
        holders = [living.get(seat.holder) for seat in status.seats if not seat.asked]
        return len(status.workers) >= 6 and [seat.role for seat in status.seats] == [
            worker.role for worker in holders if worker is not None and worker.version >= 0
        ]

    def side(self) -> str:
        """Of the second pair."""
        return self.status().seats[1].role

    def ask(self, side: str) -> None:
        told = paceline(
            "scale", f"training={2 if side == TRAINS else 1}", "--run-dir", str(self.run_dir)
        )
        assert told.returncode == 0, told.stdout + told.stderr
