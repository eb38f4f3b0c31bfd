"""Delays with which a process that ended is started again, and when the run is given up."""

import errno

import pytest

from paceline.errors import BadInput
from paceline.process.lifetime import ENGINE_LOST, exit_status
from paceline_launcher.launch.restarts import (
    LAST_DELAY_KILLED_S,
    LAST_DELAY_S,
    QUICK_FAILURES,
    GiveUp,
    RestartPolicy,
)


def delays_of(
    exit_code: int,
    times: int,
    *,
    lived_s: float = 1.0,
    every_s: float = 1.0,
    decided: RestartPolicy | None = None,
) -> list[float]:
    decided = decided or RestartPolicy(50)
    return [decided.delay_s("policy-0", exit_code, lived_s, n * every_s) for n in range(times)]


def test_bad_input_is_not_tried_again() -> None:
    with pytest.raises(GiveUp, match="bad input"):
        delays_of(2, 1)


def test_bad_input_of_a_restart_is_a_failure_like_others() -> None:
    """Its port was taken meanwhile, or a file is away for a moment."""
    decided = RestartPolicy(20)
    assert decided.delay_s("controller-0", -9, lived_s=100.0, now=0.0) == 0.0
    decided.delay_s("controller-0", 2, lived_s=1.0, now=101.0)
    decided.stands("controller-1")  # taken over from an earlier launcher
    decided.delay_s("controller-1", 2, lived_s=1.0, now=0.0)


def test_one_that_the_run_can_spare_is_never_given_up() -> None:
    decided = RestartPolicy(20)
    decided.stands("controller-0")
    for n in range(100):
        delay_s = decided.delay_s("controller-0", 2, lived_s=1.0, now=float(n), spare=True)
    assert delay_s == LAST_DELAY_S
    # What it did meanwhile is not held against it once the others have gone.
    for n in range(QUICK_FAILURES - 1):
        decided.delay_s("controller-0", 2, lived_s=1.0, now=100.0 + n)
    with pytest.raises(GiveUp):
        decided.delay_s("controller-0", 2, lived_s=1.0, now=110.0)


def test_one_that_keeps_dying_waits_longer_each_time_until_it_has_a_calm_time() -> None:
    decided = RestartPolicy(50)
    delays = delays_of(-11, 12, decided=decided)
    assert delays == sorted(delays)
    assert delays[:3] == [0.0, 0.5, 1.0]
    assert delays[-1] == LAST_DELAY_S
    assert decided.delay_s("policy-0", -11, lived_s=500.0, now=600.0) == 0.0


def test_one_that_is_killed_again_and_again_never_waits_long() -> None:
    assert max(delays_of(-9, 50)) == LAST_DELAY_KILLED_S


@pytest.mark.parametrize(("exit_code", "limit"), [(1, 1), (ENGINE_LOST, 2)])
def test_one_that_cannot_start_ends_the_run_later_if_a_prompt_may_be_at_fault(
    exit_code: int, limit: int
) -> None:
    decided = RestartPolicy(50)
    delays = delays_of(exit_code, limit * QUICK_FAILURES - 1, decided=decided)
    assert exit_code == 1 or max(delays) <= LAST_DELAY_KILLED_S
    with pytest.raises(GiveUp, match="failed"):
        decided.delay_s("policy-0", exit_code, lived_s=1.0, now=30.0)
    assert decided.delay_s("policy-1", exit_code, lived_s=1.0, now=30.0) == 0.0


def test_too_many_restarts_in_the_window_end_the_run() -> None:
    decided = RestartPolicy(3)
    delays_of(-9, 3, lived_s=100.0, every_s=10.0, decided=decided)
    with pytest.raises(GiveUp, match="4 times"):
        decided.delay_s("policy-0", -9, lived_s=100.0, now=30.0)
    assert len(delays_of(-9, 9, lived_s=100.0, every_s=400.0, decided=RestartPolicy(3))) == 9


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "met",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        RuntimeError("can't start new thread"),
    ],
    ids=repr,
)
def test_what_can_pass_ends_no_run_however_often_a_process_meets_it(
    met: Exception, wrapped: bool
) -> None:
    def main() -> int:
        try:
            raise met
        except Exception:
            if wrapped:
                raise BadInput("model.path cannot be loaded") from None
            raise

    assert delays_of(exit_status(main, "worker"), 99, decided=RestartPolicy(3))[-1] == LAST_DELAY_S
