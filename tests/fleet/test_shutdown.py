"""A run ends although a process is missing at that very moment, or in the middle of a long step."""

import signal

import pytest

from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("missing", ["policy-1", "rollout-1", "controller-1"])
def test_a_stop_does_not_wait_for_a_process_that_hangs(start: Start, missing: str) -> None:
    up = start(train={"steps": 100_000})
    up.until(lambda: up.step() >= 2)
    up.kill(missing, signal.SIGSTOP)
    up.process.send_signal(signal.SIGINT)
    assert up.wait(60) == 130, up.said()
    up.assert_sound("interrupted")
