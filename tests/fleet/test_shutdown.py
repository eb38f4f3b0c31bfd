"""A run ends although a process is missing at that very moment."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from testbed.fleets.local_run import Up, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("missing", ["policy-1", "rollout-1", "controller-1"])
def test_a_stop_does_not_wait_for_a_process_that_hangs(tmp_path: Path, missing: str) -> None:
    config = write_run(tmp_path, train={"steps": 100_000})
    up = Up(config, tmp_path / "run")
    try:
        up.until(lambda: up.step() >= 2)
        up.kill(missing, signal.SIGSTOP)
        up.process.send_signal(signal.SIGINT)
        assert up.wait(60) == 130, up.said()
        assert up.alive() == []
        assert up.summary()["ledger_ok"] is True
    finally:
        up.close()


def test_a_run_finishes_although_a_replica_hangs_in_its_last_steps(tmp_path: Path) -> None:
    config = write_run(tmp_path, train={"steps": 25}, fleet={"lease_ttl_s": 3.0})
    up = Up(config, tmp_path / "run")
    try:
        up.until(lambda: up.step() >= 20)
        up.kill("policy-1", signal.SIGSTOP)
        assert up.wait(150) == 0, up.said()
        assert up.alive() == []
        summary = up.summary()
        assert (summary["status"], summary["steps"]) == ("finished", 25)
        assert summary["ledger_ok"] is True
    finally:
        up.close()
