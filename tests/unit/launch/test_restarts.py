"""When a process that ended is started again, and when the run is given up."""

from __future__ import annotations

from paceline.process.lifetime import ENGINE_LOST
from paceline_launcher.launch.restarts import (
    LAST_DELAY_KILLED_S,
    LAST_DELAY_S,
    QUICK_FAILURES,
    GiveUp,
    Leave,
    Restart,
    RestartPolicy,
)


def policy(enabled: bool = True, max_restarts: int = 20) -> RestartPolicy:
    return RestartPolicy(enabled=enabled, max_restarts=max_restarts)


def test_a_killed_process_is_started_at_once() -> None:
    assert policy().decide("policy-0", -9, lived_s=1.0, now=0.0) == Restart(0.0)


def test_bad_input_is_not_tried_again() -> None:
    assert isinstance(policy().decide("policy-0", 2, lived_s=1.0, now=0.0), GiveUp)


def test_bad_input_of_a_restart_is_a_failure_like_others() -> None:
    """Its port was taken meanwhile, or a file is away for a moment."""
    decided = policy()
    assert decided.decide("controller-0", -9, lived_s=100.0, now=0.0) == Restart(0.0)
    assert isinstance(decided.decide("controller-0", 2, lived_s=1.0, now=101.0), Restart)
    decided.stands("controller-1")  # taken over from an earlier launcher
    assert isinstance(decided.decide("controller-1", 2, lived_s=1.0, now=0.0), Restart)


def delays_of(exit_code: int) -> list[float]:
    decided = policy(max_restarts=50)
    delays = []
    for i in range(12):
        verdict = decided.decide("rollout-0", exit_code, lived_s=1.0, now=float(i))
        assert isinstance(verdict, Restart)
        delays.append(verdict.delay_s)
    return delays


def test_one_that_keeps_dying_waits_longer_each_time() -> None:
    delays = delays_of(-11)
    assert delays == sorted(delays)
    assert delays[:3] == [0.0, 0.5, 1.0]
    assert delays[-1] == LAST_DELAY_S


def test_one_that_is_killed_again_and_again_never_waits_long() -> None:
    assert max(delays_of(-9)) == LAST_DELAY_KILLED_S


def test_an_engine_that_dies_at_its_work_is_given_time_until_the_prompt_is_found() -> None:
    decided = policy()
    tries = range(2 * QUICK_FAILURES)
    verdicts = [decided.decide("rollout-0", ENGINE_LOST, lived_s=1.0, now=float(i)) for i in tries]
    assert all(isinstance(v, Restart) and v.delay_s <= LAST_DELAY_KILLED_S for v in verdicts[:-1])
    assert isinstance(verdicts[-1], GiveUp)


def test_a_calm_time_forgives() -> None:
    decided = policy()
    for i in range(5):
        decided.decide("rollout-0", -9, lived_s=1.0, now=float(i))
    assert decided.decide("rollout-0", -9, lived_s=500.0, now=600.0) == Restart(0.0)


def test_one_that_cannot_start_ends_the_run() -> None:
    decided = policy()
    verdicts = [
        decided.decide("policy-0", 1, lived_s=2.0, now=float(i)) for i in range(QUICK_FAILURES)
    ]
    assert isinstance(verdicts[-2], Restart)
    assert isinstance(verdicts[-1], GiveUp)


def test_chaos_by_signals_is_no_faulty_set_up() -> None:
    decided = policy(max_restarts=100)
    verdicts = [decided.decide("policy-0", -9, lived_s=2.0, now=float(i)) for i in range(50)]
    assert all(isinstance(verdict, Restart) for verdict in verdicts)


def test_too_many_restarts_in_the_window_end_the_run() -> None:
    decided = policy(max_restarts=3)
    verdicts = [decided.decide("policy-0", -9, lived_s=100.0, now=i * 10.0) for i in range(4)]
    assert [type(v) for v in verdicts] == [Restart, Restart, Restart, GiveUp]
    spread = policy(max_restarts=3)
    verdicts = [spread.decide("policy-0", -9, lived_s=100.0, now=i * 400.0) for i in range(9)]
    assert all(isinstance(verdict, Restart) for verdict in verdicts)


def test_names_do_not_share_their_record() -> None:
    decided = policy(max_restarts=1)
    assert isinstance(decided.decide("policy-0", -9, lived_s=1.0, now=0.0), Restart)
    assert isinstance(decided.decide("policy-1", -9, lived_s=1.0, now=0.0), Restart)


def test_restart_off_leaves_it() -> None:
    assert policy(enabled=False).decide("policy-0", -9, lived_s=1.0, now=0.0) == Leave()
