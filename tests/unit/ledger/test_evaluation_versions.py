"""The score of an evaluation round is of one version of the weights, which it names."""

import pytest

from controller.ledger import events as ev
from controller.ledger.state.fleet import Fleet
from paceline.observe.held_out import HeldOut
from tests.fixtures.ledgers import Driven


@pytest.fixture
def run() -> Driven:
    """Two workers serve version 0, a round of four rows is due, and step 1 can commit."""
    return Driven.fleet("p0", "r0", "r1", eval_rows=4, eval_every=5, max_staleness=4)


def commit(run: Driven, worker_id: str) -> None:
    run.fill(worker_id, 4)
    run.vote("p0")


def evals(leases: object) -> list[str]:
    return [lease.task_id for lease in leases if lease.task_id.startswith("e")]  # type: ignore[attr-defined]


def test_rows_go_to_workers_of_the_rounds_version_while_there_are_any(run: Driven) -> None:
    first = run.lease("r0", 2).leases
    assert evals(first) == ["e0.0", "e0.1"]
    rest = run.lease("r1", 2).leases
    commit(run, "r1")
    run.return_task("r1", rest[0], "hand_back")
    run.observe("r1", loaded=1)
    assert evals(run.lease("r1", 1).leases) == [], "r0 still serves the version of the round"
    assert evals(run.lease("r0", 1, version=0).leases) == ["e0.2"]


def test_a_request_looks_at_no_fleet_for_a_round_that_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Driven.fleet("p0", "r0", "r1", checked=False, eval_rows=4, max_staleness=4)
    run.lease("r0", 4)

    def look(*_: object) -> None:
        raise AssertionError("with 1,000 workers this is most of the leader's time")

    monkeypatch.setattr(Fleet, "living", look)
    monkeypatch.setattr(Fleet, "at_work", look)
    assert run.state.evals.rounds and not evals(run.lease("r1", 1).leases)


def test_a_round_goes_on_when_nobody_serves_its_version_any_more(run: Driven) -> None:
    run.lease("r0", 2)
    rest = run.lease("r1", 2).leases
    commit(run, "r1")
    run.return_task("r1", rest[0], "hand_back")
    run.observe("r1", loaded=1)
    run.die("r0")
    assert evals(run.lease("r1", 3).leases) == ["e0.0", "e0.1", "e0.2"]


def test_the_score_is_of_the_version_of_most_rows_and_others_are_left_out() -> None:
    run = Driven.fleet("p0", "r0", "r1", eval_rows=5, eval_every=5, max_staleness=4)
    leases = [*run.lease("r0", 4).leases, *run.lease("r1", 1).leases]
    commit(run, "r1")
    for lease, reward in zip(leases[:3], (1.0, 0.5, 0.75), strict=True):
        run.submit("r0", lease, version=0, reward_mean=reward)
    run.submit("r0", leases[3], version=0, max_version=1, reward_mean=0.0)
    run.submit("r1", leases[4], version=1, reward_mean=0.0)
    recorded = run.event(ev.EvalRecorded)
    assert (recorded.version, recorded.reward_mean, recorded.count) == (0, 0.75, 3)
    assert recorded.left_out == 2
    told = "left out: 2 sampled with other weights"
    assert recorded.text().endswith(told)
    held_out = HeldOut()
    for event in run.journal:
        held_out.take(event["type"], event)
    assert told in held_out.trouble and told in held_out.left_out
    run.failover()


def test_a_round_without_a_version_of_most_rows_has_no_score_that_could_be_the_best(
    run: Driven,
) -> None:
    """Two rows of four: their mean may be high by chance."""
    leases = [*run.lease("r0", 3).leases, *run.lease("r1", 1).leases]
    commit(run, "r1")
    for lease in leases[:2]:
        run.submit("r0", lease, version=0, reward_mean=1.0)
    run.submit("r0", leases[2], version=0, max_version=1)
    run.return_task("r1", leases[3], "drop")
    recorded = run.event(ev.EvalRecorded)
    assert (recorded.reward_mean, recorded.count, recorded.left_out) == (None, 2, 1)
    assert "too few" in recorded.text()
    assert "left out: 1 sampled with other weights and 1 without a score" in recorded.text()
    assert run.state.evals.scores == {}
    run.failover()


def test_rows_of_weights_that_were_outvoted_are_left_out_and_counted() -> None:
    """Those that were scored before the vote, and those that were in flight."""
    run = Driven.fleet(
        "p0", "p1", "p2", "r0", eval_rows=4, eval_every=1, checkpoint_every=1, max_staleness=4
    )
    run.fill("r0", 4)
    run.train()
    run.observe("r0", loaded=1)
    leases = run.lease("r0", 4).leases
    assert evals(leases) == [f"e1.{row}" for row in range(4)]
    for lease in leases[:2]:
        run.submit("r0", lease, version=1, reward_mean=1.0)
    run.checkpoint("p0", "wrong")
    run.fill("r0", 4)
    run.vote("p0", "wrong")
    run.vote("p1", "right")
    run.vote("p2", "right")
    assert run.event(ev.CheckpointVoided).version == 1
    run.failover()
    for lease in leases[2:]:
        run.submit("r0", lease, version=1, reward_mean=1.0)
    recorded = run.event(ev.EvalRecorded)
    assert (recorded.reward_mean, recorded.count, recorded.left_out) == (None, 0, 4)
    assert 1 not in run.state.evals.scores
