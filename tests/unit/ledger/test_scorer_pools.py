"""Scorers in the ledger: each pool is scaled and drained on its own, and across failovers."""

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from tests.fixtures.ledgers import Driven

BOUNDS = {"scorers_min": 1, "scorers_max": 3}


def scored() -> Driven:
    """Two scorers named helpful and one named short, all alive."""
    run = Driven(
        desired={"policy": 1, "rollout": 1, "scorer:helpful": 2, "scorer:short": 1}, bounds=BOUNDS
    )
    for worker_id in ("scorer-helpful-0", "scorer-helpful-1", "scorer-short-0"):
        run.register(worker_id, scorer=worker_id.split("-")[1], address="127.0.0.1:1")
        run.observe(worker_id)
    return run


def test_one_scorer_is_scaled_and_the_others_are_not() -> None:
    run = scored()
    reply = run.do(cmd.scale("x", {"scorer:helpful": 3}))
    assert "scorer:helpful=3" in reply
    run.failover()
    assert run.state.desired["scorer:helpful"] == 3
    assert run.state.desired["scorer:short"] == 1
    assert run.do(cmd.scale("x", {"scorer:helpful": 3})) == reply


@pytest.mark.parametrize(
    ("desired", "why"),
    [
        ({"scorer:helpful": 4}, r"scorer:helpful=4 is above fleet\.scorers_max = 3"),
        ({"scorer:helpful": 0}, "scorer:helpful=0: at least 1"),
        ({"scorer:other": 1}, "scorer:other"),
    ],
)
def test_a_scale_that_a_scorer_cannot_have_is_refused(desired: dict[str, int], why: str) -> None:
    run = scored()
    with pytest.raises(cmd.CommandRefused, match=why):
        run.do(cmd.scale("x", desired))
    assert run.state.desired["scorer:helpful"] == 2


def test_a_drain_lowers_the_number_of_its_own_pool() -> None:
    run = scored()
    run.do(cmd.drain("d", "scorer-helpful-1"))
    assert run.event(ev.Drained).desired == {"scorer:helpful": 1}
    run.failover()
    assert run.state.desired["scorer:helpful"] == 1
    assert run.state.desired["scorer:short"] == 1


def test_the_last_of_a_pool_is_drained_only_if_it_is_replaced() -> None:
    """The scorers of another name cannot stand in for it."""
    run = scored()
    with pytest.raises(cmd.CommandRefused, match=r"fleet\.scorers_min = 1"):
        run.do(cmd.drain("d", "scorer-short-0"))
    run.do(cmd.drain("e", "scorer-short-0", replace=True))
    assert run.state.desired["scorer:short"] == 1


def test_the_death_of_a_scorer_returns_no_task() -> None:
    run = scored()
    run.rollout("r0")
    (lease,) = run.lease("r0").leases
    run.die("scorer-helpful-0")
    assert "TaskReleased" not in run.names()
    run.failover()
    assert run.submit("r0", lease).code == "accepted"
