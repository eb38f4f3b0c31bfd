"""Failpoints of the testbed: each one finds the functions that it replaces."""

import signal
from pathlib import Path

import pytest

import policy_worker.main  # noqa: F401
import rollout_worker.main  # noqa: F401
from testbed.faults.failpoints import POLICY, ROLLOUT, Trap


@pytest.mark.parametrize("instant", [*POLICY, *ROLLOUT])
def test_a_failpoint_replaces_a_function_and_puts_it_back(instant: str, tmp_path: Path) -> None:
    trap = Trap(tmp_path, instant, signal.SIGKILL)
    trap.set()
    trap._undo()
