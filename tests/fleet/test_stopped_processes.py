"""Real processes stopped at every wait point: ``paceline why`` names the right one before it is
dead.

One fleet serves all tests. A stopped process is continued as soon as it was named.
"""

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from paceline.errors import Unreachable
from paceline_launcher.cli import app
from testbed.faults import failpoints
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.fleets.local_run import paceline
from testbed.rewards import file_of
from tests.fixtures.shared import Shared

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(300)]

LEASE_S = 30.0
REWARDS = ["testbed.rewards:judge", "testbed.rewards:careless"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[LaunchedFleet]]:
    def start() -> LaunchedFleet:
        reward = {"functions": REWARDS, "processes": 0, "timeout_s": 120.0}
        fleet = {"lease_ttl_s": LEASE_S}
        return LaunchedFleet(tmp_path_factory.mktemp("why"), reward=reward, fleet=fleet)

    fleet = Shared(start)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared: Shared[LaunchedFleet], request: pytest.FixtureRequest) -> Iterator[LaunchedFleet]:
    running = shared.get()
    running.settled()
    yield running
    shared.after(request.node)


def why(fleet: LaunchedFleet) -> dict[str, object]:
    """The leader's answer, as a user gets it; {} if there is no leader."""
    # In this process: polls that start a command each would take a core from the run.
    words = ["why", "--run-dir", str(fleet.run_dir), "--json"]
    try:
        done = CliRunner().invoke(app, words, catch_exceptions=False)
    except Unreachable:
        return {}
    return next((a for a in json.loads(done.stdout)["answers"] if a["leads"]), {})


def until_named(fleet: LaunchedFleet, name: str, word: str = "") -> dict[str, object]:
    """Waits for a diagnosis that accuses ``name`` and contains ``word``; fails if another is
    dead."""
    last: dict[str, object] = {}

    def named() -> bool:
        nonlocal last
        last = why(fleet) or last
        culprit = last.get("culprit")
        accused = isinstance(culprit, dict) and culprit["name"] == name
        return accused and word in str(last["sentence"]) and last["severity"] != "ok"

    try:
        fleet.until(named, 60.0)
    except AssertionError:
        raise AssertionError(f"{name} was not named; the last answer was {last}") from None
    return last


def victim_of(fleet: LaunchedFleet, instant: str) -> str:
    if instant in failpoints.ROLLOUT:
        return "rollout-1"
    if instant == "send":
        links = [e for _, e in fleet.tail.events if e["type"] == "LinkAssigned"]
        return str(links[-1]["publisher"])
    return "policy-1"


@pytest.mark.parametrize(
    "instant",
    [
        "reduce",
        "state_transfer",
        "generate",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("idle", "send", "receive")),
    ],
)
def test_a_process_stopped_at_a_wait_point_is_named_before_it_is_dead(
    fleet: LaunchedFleet, instant: str
) -> None:
    """All instants, in every run: tests/unit/diagnosis/test_diagnosis.py."""
    fleet.mark()
    victim, others = victim_of(fleet, instant), []
    if instant == "state_transfer":
        # Its peer's replacement has the state sent by it.
        others = ["policy-0"]
    pid = fleet.process(victim).pid
    fallen = failpoints.fall(fleet.armed, pid, instant, signal.SIGSTOP)
    at = fleet.mark()
    for name in others:
        fleet.send(name)
    fallen(90.0)
    try:
        found = until_named(fleet, victim, "stopped")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert found["culprit"]["pid"] == pid  # type: ignore[index]
    assert re.search(r"it is declared dead in [\d.]+ s", str(found["sentence"]))
    assert f"kill -CONT {pid}" in str(found["remedy"])
    fleet.mark()
    dead = [e["worker_id"] for _, e in fleet.tail.events[at:] if e["type"] == "WorkerDied"]
    assert victim not in dead


def test_a_reward_that_never_returns_is_named_and_its_stacks_are_shown(
    fleet: LaunchedFleet,
) -> None:
    hang = file_of(fleet.armed, "judge")
    hang.touch()
    try:
        found = until_named(fleet, ", ".join(REWARDS))
        assert "rollout-" in str(found["sentence"]) and "reward.timeout_s" in str(found["next"])
        shown = paceline("stacks", "rollout-0", "--run-dir", str(fleet.run_dir))
        assert shown.returncode == 0 and "Thread 0x" in shown.stdout, shown.stdout
    finally:
        hang.unlink()
    fleet.steps(1)


def test_without_any_controller_the_cli_says_what_the_kernel_knows(fleet: LaunchedFleet) -> None:
    pids = [fleet.process(f"controller-{i}").pid for i in range(2)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        said = paceline("why", "--run-dir", str(fleet.run_dir))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert said.returncode == 3
    for pid in pids:
        assert re.search(rf"pid {pid}\) is stopped.*kill -CONT {pid}", said.stderr), said.stderr
