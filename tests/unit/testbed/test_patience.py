"""Limits of waits in tests: as long as they say on an idle machine, longer on a busy one."""

import os

import pytest

from testbed.patience import Patience, patient, slowness

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("threads", "slow"), [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (4.0, 4.0)])
def test_a_limit_grows_with_the_threads_that_share_a_core(
    monkeypatch: pytest.MonkeyPatch, threads: float, slow: float
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (threads * CORES, 0.0, 0.0))
    assert slowness() == slow
    assert patient(60) == 60 * slow


def test_patience_passes_as_fast_as_the_machine_is_at_the_time() -> None:
    now, slow = 100.0, 1.0
    patience = Patience(10.0, clock=lambda: now, slow=lambda: slow)
    now += 9.0
    assert patience.left()
    slow, now = 4.0, now + 3.9
    assert patience.left()
    now += 0.2
    assert not patience.left()
