"""Steps whose gradient is not finite, one after the other: the run ends with the reason."""

import pytest

from controller.ledger.specs import StatValue
from tests.fixtures.ledgers import Driven

SKIPPED = {"update_skipped": StatValue(1.0, 1.0, 1.0)}
APPLIED = {"update_skipped": StatValue(0.0, 1.0, 0.0)}


@pytest.mark.parametrize(
    ("limit", "votes", "failed"),
    [
        (3, [APPLIED, SKIPPED, SKIPPED, SKIPPED], True),
        (3, [SKIPPED, SKIPPED, APPLIED, SKIPPED, SKIPPED, APPLIED], False),
        (0, [SKIPPED] * 12, False),
    ],
)
def test_so_many_steps_without_a_finite_gradient_in_a_row_fail_the_run(
    limit: int, votes: list[dict[str, StatValue]], failed: bool
) -> None:
    """A step that changes weights starts the count again; without a limit the run goes on."""
    run = Driven.fleet("p0", "p1", "r0", steps=30, max_nonfinite_steps=limit)
    for stats in votes:
        assert run.state.phase == "open"
        run.failover()
        run.observe("r0", loaded=run.state.versions.version)
        run.fill("r0", 4)
        run.vote("p0", stats=stats)
        run.vote("p1", stats=stats)
    assert run.state.phase == ("failed" if failed else "open")
    if failed:
        assert "3 steps in a row were not finite, from step 2 on" in run.state.reason
        assert run.names()[-1] == "RunFailed"
