"""Failpoints of the testbed: each one finds the functions that it replaces."""

import signal
from pathlib import Path

import pytest

import policy_worker.main
import rollout_worker.main
from testbed.faults.failpoints import Trap

INSTANTS = {
    policy_worker.main: ("idle", "forward", "reduce", "vote", "commit", "state_transfer", "send"),
    rollout_worker.main: ("generate", "submit", "receive"),
}


@pytest.mark.parametrize("instant", [name for names in INSTANTS.values() for name in names])
def test_a_failpoint_replaces_a_function_and_puts_it_back(instant: str, tmp_path: Path) -> None:
    trap = Trap(tmp_path, instant, signal.SIGKILL)
    trap.set()
    trap._undo()


def test_every_failpoint_is_listed() -> None:
    methods = {name for name in vars(Trap) if name.startswith("_") and not name.startswith("__")}
    helpers = {"_fall", "_soon", "_replace", "_before", "_during", "_after_header"}
    listed = {f"_{name}" for names in INSTANTS.values() for name in names}
    assert listed == methods - helpers
