"""Three pairs whose devices are lent, on the CPU, as a user starts them: a wrong split moves by
itself, `paceline scale` steers, and kills inside a loan lose nothing."""

from collections.abc import Iterator
from functools import partial

import pytest
from typer.testing import CliRunner

from paceline.observe.fleet_file import FleetRecord
from paceline.rpc.client import ControlPlaneUnavailable
from paceline_launcher.cli import app
from testbed.faults import failpoints
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.fleets.local_run import SLOWLY
from tests.fixtures.shared import Shared
from tests.fleet.test_turns import assert_one_holder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TRAINS, GENERATES = "policy", "rollout"


class LentFleet(LaunchedFleet):
    """Of three pairs two train at first, although generation takes most of the time. Once the first
    one trains, it is the second one that changes its side."""

    def settled(self, limit_s: float = 90.0) -> None:
        """Every seat is held by a worker of its side, which works."""
        self.until(self._at_work, limit_s)
        self.steps(1)

    def _at_work(self) -> bool:
        record = FleetRecord.read(self.run_dir)
        if record is None or len(record.processes) < self.expected:
            return False
        try:
            living, seats = self.workers(), self.status().seats
        except ControlPlaneUnavailable:
            return False
        holders = [living.get(seat.holder) for seat in seats if not seat.asked]
        able = [w.worker_id for w in holders if w is not None and w.version >= 0]
        sides = [worker_id.partition("-")[0] for worker_id in able]
        return len(living) == 6 and len(sides) == 3 and sides == [seat.role for seat in seats]

    @property
    def sides(self) -> list[str]:
        return [seat.role for seat in self.status().seats]

    def lend(self, side: str) -> None:
        """Asks for it, as a user does."""
        count = f"training={2 if side == TRAINS else 1}"
        # In this process: the start of one takes two seconds of a core.
        told = CliRunner().invoke(app, ["scale", count, "--run-dir", str(self.run_dir)])
        assert told.exit_code == 0 and "pairs train" in told.stdout, told.output

    def be_lent_to(self, side: str) -> None:
        """Until the second pair is at work on this side, and the first one trains."""
        self.settled()
        while (sides := self.sides) != [TRAINS, side, GENERATES]:
            self.lend(TRAINS if sides.count(TRAINS) == 1 else GENERATES)
            self.until(partial(self._differs, sides))
            self.settled()

    def _differs(self, sides: list[str]) -> bool:
        return self.sides != sides


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[LentFleet]]:
    def started() -> LentFleet:
        return LentFleet(
            tmp_path_factory.mktemp("lent"),
            fleet={
                "controllers": 2,
                "policy": 3,
                "rollout": 3,
                "sharing": "lend",
                "training_pairs": 2,
                "autoscale_steps": 3,
            },
            train={"max_staleness": 1, "checkpoint_every": 3},
            rollout={"max_tokens": 48, "max_sequences": 4},
            reward=SLOWLY,
        )

    fleet = Shared(started)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared: Shared[LentFleet], request: pytest.FixtureRequest) -> Iterator[LentFleet]:
    running = shared.get()
    running.settled()
    yield running
    if shared.after(request.node):
        running.mark()
        assert_one_holder([event for _, event in running.tail.events])
        running.assert_sound()


def test_a_wrong_split_moves_by_itself_to_a_better_one_and_a_user_can_move_it_back(
    fleet: LentFleet,
) -> None:
    _, event, at = fleet.first(lambda e: e["type"] == "TrainingSeatsSet", 0, 120.0)
    assert event["seats"] == 1 and event["why"].startswith("replicas wait for groups")
    fleet.settled()
    assert fleet.sides.count(TRAINS) == 1
    fleet.lend(TRAINS)
    _, event, at = fleet.first(lambda e: e["type"] == "TrainingSeatsSet", at)
    assert event["seats"] == 2 and event["why"] == "by request"
    *_, at = fleet.first(lambda e: e["type"] == "SeatLent" and e["role"] == TRAINS, at - 1)
    fleet.first(lambda e: e["type"] == "SeatGranted" and e["worker_id"].startswith(TRAINS), at)


@pytest.mark.parametrize(
    ("side", "victim", "instant"),
    [
        # In every run this one; a rollout worker that parks in test_turns.py, and all in the
        # simulator.
        (GENERATES, "policy-1", "parking"),
        *(
            pytest.param(side, victim, instant, marks=pytest.mark.slow)
            for side, victim, instants in (
                (TRAINS, "rollout-1", ("park", "parking", "parked")),
                (TRAINS, "policy-1", ("unpark", "state_arrival")),
                (GENERATES, "policy-1", ("park", "parked")),
                (GENERATES, "rollout-1", ("unpark",)),
            )
            for instant in instants
        ),
    ],
)
def test_a_worker_that_is_killed_inside_a_loan_costs_the_others_nothing(
    fleet: LentFleet, side: str, victim: str, instant: str
) -> None:
    other = GENERATES if side == TRAINS else TRAINS
    if instant in ("unpark", "state_arrival"):
        fleet.be_lent_to(side)  # its first turn loads the model
    fleet.be_lent_to(other)
    before, at = fleet.pids(), fleet.mark()
    fallen = failpoints.fall(fleet.armed, before[victim], instant)
    fleet.lend(side)
    fallen(60.0)
    fleet.first(lambda e: e["type"] == "WorkerRegistered" and e["worker_id"] == victim, at)
    fleet.steps(3)
    assert {name for name, pid in fleet.pids().items() if pid != before[name]} == {victim}


@pytest.mark.parametrize(
    ("victim", "instant"),
    [
        ("leader", "SeatReturned"),
        pytest.param("leader", "SeatLent", marks=pytest.mark.slow),
        pytest.param("leader", "SeatGranted", marks=pytest.mark.slow),
        pytest.param("policy-0", "SeatGranted", marks=pytest.mark.slow),
    ],
)
def test_a_loan_goes_on_if_the_leader_or_the_other_trainer_is_killed(
    fleet: LentFleet, victim: str, instant: str
) -> None:
    fleet.be_lent_to(GENERATES)
    victim = fleet.status().leader if victim == "leader" else victim
    before, at = fleet.pids(), fleet.mark()
    fleet.lend(TRAINS)
    lent = at
    *_, at = fleet.first(lambda e: e["type"] == instant and e["seat"].endswith("-1"), at)
    fleet.send(victim)
    fleet.first(lambda e: e["type"] == "SeatGranted" and e["worker_id"] == "policy-1", lent)
    fleet.steps(3)
    assert {name for name, pid in fleet.pids().items() if pid != before[name]} <= {victim}
