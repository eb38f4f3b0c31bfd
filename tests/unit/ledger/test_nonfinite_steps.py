"""Steps whose gradient is not finite, one after the other: the run ends with the reason."""

from controller.ledger.specs import StatValue
from tests.fixtures.ledgers import Driven

SKIPPED = {"update_skipped": StatValue(1.0, 1.0, 1.0)}
APPLIED = {"update_skipped": StatValue(0.0, 1.0, 0.0)}


def run_of(**changes: object) -> Driven:
    return Driven.fleet("p0", "p1", "r0", steps=30, **changes)


def step(run: Driven, stats: dict[str, StatValue]) -> None:
    run.observe("r0", loaded=run.state.versions.version)
    run.fill("r0", 4)
    run.vote("p0", stats=stats)
    run.vote("p1", stats=stats)


def test_so_many_steps_without_a_finite_gradient_in_a_row_fail_the_run() -> None:
    run = run_of(max_nonfinite_steps=3)
    step(run, APPLIED)
    for _ in range(3):
        assert run.state.phase == "open"
        step(run, SKIPPED)
        run.failover() if run.state.phase == "open" else None
    assert run.state.phase == "failed"
    assert "3 steps in a row were not finite, from step 2 on" in run.state.reason
    assert run.names()[-1] == "RunFailed"


def test_a_step_that_changes_weights_starts_the_count_again() -> None:
    run = run_of(max_nonfinite_steps=3)
    for stats in (SKIPPED, SKIPPED, APPLIED, SKIPPED, SKIPPED, APPLIED):
        step(run, stats)
    assert run.state.phase == "open"


def test_without_a_limit_the_run_goes_on() -> None:
    run = run_of(max_nonfinite_steps=0)
    for _ in range(12):
        step(run, SKIPPED)
    assert run.state.phase == "open"
