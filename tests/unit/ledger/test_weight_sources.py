"""Who sends weights if several replicas can: each takes its share, and the others go on for one
that is lost."""

from collections import Counter

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.enums import Role
from tests.fixtures.ledgers import Driven

REPLICAS = ("p0", "p1", "p2")


def fleet(rollouts: int, replicas: tuple[str, ...] = REPLICAS, fanout: int = 0) -> Driven:
    return Driven.fleet(*replicas, *(f"r{n}" for n in range(rollouts)), relay_fanout=fanout)


def publishers(run: Driven) -> dict[str, str]:
    return {receiver: link.publisher for receiver, link in run.state.fleet.links.items()}


def copies(run: Driven) -> dict[str, int]:
    """Of the replicas."""
    return dict(Counter(p for p in publishers(run).values() if p.startswith("p")))


def loaded(run: Driven) -> None:
    for worker in run.state.fleet.living(Role.ROLLOUT):
        run.observe(worker.worker_id, loaded=run.state.versions.version)


@pytest.mark.parametrize(
    ("fanout", "expected"), [(0, {"p0": 3, "p1": 3, "p2": 2}), (1, {"p0": 1, "p1": 1, "p2": 1})]
)
def test_receivers_are_dealt_out_over_the_replicas(fanout: int, expected: dict[str, int]) -> None:
    assert copies(fleet(8, fanout=fanout)) == expected


@pytest.mark.parametrize("fanout", [0, 1])
def test_receivers_of_a_dead_replica_go_on_with_the_others(fanout: int) -> None:
    run = fleet(9, fanout=fanout)
    before = dict(run.state.fleet.links)
    run.die("p1")
    after = run.state.fleet.links
    assert "p1" not in publishers(run).values() and len(after) == 9
    assert {r for r in after if after[r] != before[r]} == {
        r for r in before if before[r].publisher == "p1"
    }
    assert set(copies(run)) == {"p0", "p2"}


@pytest.mark.parametrize(("fanout", "expected"), [(0, 2), (1, 1)])
def test_a_replica_that_comes_takes_its_share(fanout: int, expected: int) -> None:
    run = fleet(4, ("p0",), fanout)
    run.policy("p1")
    assert copies(run) == {"p0": expected, "p1": expected}
    assert len(publishers(run)) == 4


def test_a_replica_that_comes_takes_half_of_a_chain() -> None:
    run = fleet(6, ("p0",), fanout=1)
    run.policy("p1")
    assert publishers(run) == {
        "r0": "p0", "r1": "r0", "r2": "r1", "r3": "p1", "r4": "r3", "r5": "r4",
    }  # fmt: skip


@pytest.mark.parametrize("fanout", [0, 1])
def test_a_replica_that_leaves_keeps_the_trees_of_the_others(fanout: int) -> None:
    run = fleet(6, fanout=fanout)
    planted, before = run.state.fleet.tree, dict(run.state.fleet.links)
    run.do(cmd.drain("d", "p0", replace=True))
    after = run.state.fleet.links
    assert not run.state.fleet.in_mesh("p0", run.current["p0"])
    assert "p0" not in publishers(run).values()
    assert run.state.fleet.tree == planted
    assert {r for r in after if after[r] != before[r]} == {
        r for r in before if before[r].publisher == "p0"
    }


def test_a_broken_link_is_replaced_by_one_from_another_replica() -> None:
    run = fleet(3)
    broken = run.state.fleet.links["r1"]
    run.do(cmd.break_link("r1", run.current["r1"], broken.generation))
    assert publishers(run)["r1"] != broken.publisher
    run.rollout("r3")
    assert publishers(run)["r1"] != broken.publisher, "dealing out does not bring it back"


def test_a_new_source_holds_the_newest_state() -> None:
    run = fleet(6, ("p0", "p1"))
    run.register("p2")
    run.observe("p2")
    assert "p2" not in publishers(run).values()
    run.observe("p2", state=run.state.versions.version)
    assert copies(run) == {"p0": 2, "p1": 2, "p2": 2}


def many_ranks(run: Driven) -> None:
    for replica in run.state.fleet.living(Role.POLICY):
        replica.ranks = 2


@pytest.mark.parametrize("fanout", [0, 1])
def test_during_a_step_a_joiner_gets_its_weights_from_a_replica_that_has_a_copy(
    fanout: int,
) -> None:
    """A replica of several ranks that fed nobody makes none before the step's end."""
    run = fleet(1, fanout=fanout)
    many_ranks(run)
    run.fill("r0", 4)
    assert run.state.steps.open is not None
    run.register("r1")
    run.observe("r1")
    assert publishers(run)["r1"] in ("p0", "r0")
    for replica in REPLICAS:
        run.vote(replica)
    loaded(run)
    run.rollout("r2")
    assert set(copies(run)) == set(REPLICAS) or fanout


def test_during_a_step_only_receivers_that_have_the_newest_version_are_dealt_out() -> None:
    run = fleet(2, ("p0",))
    run.fill("r0", 4)
    run.register("p1")
    run.observe("p1")
    many_ranks(run)
    run.vote("p0")
    run.fill("r0", 4)
    run.observe("p1", state=run.state.versions.version)
    assert run.state.steps.open is not None
    assert copies(run) == {"p0": 2}, "both wait for it"
    run.observe("r0", loaded=run.state.versions.version)
    run.rollout("r2")
    assert publishers(run)["r0"] == "p1"


def outvote(run: Driven, wrong: str) -> None:
    run.fill("r0", 4)
    for replica in REPLICAS:
        run.vote(replica, "wrong" if replica == wrong else "right")


@pytest.mark.parametrize("fanout", [0, 1])
def test_what_an_outvoted_replica_sent_is_taken_back_after_its_receiver_has_moved(
    fanout: int,
) -> None:
    """A link that broke meanwhile hides from whom the weights came."""
    run = fleet(3, fanout=fanout)
    run.train()
    loaded(run)
    moved = next(r for r, p in publishers(run).items() if p == "p1")
    epoch = run.state.fleet.links[moved].generation
    run.do(cmd.break_link(moved, run.current[moved], epoch))
    assert publishers(run)[moved] != "p1"
    outvote(run, "p1")
    assert moved in run.event(ev.WeightsWithdrawn).receivers
    assert run.state.fleet.links[moved].reload
    assert run.state.fleet.workers[moved].loaded_version == -1


def test_what_an_outvoted_replica_sent_before_the_version_is_not_taken_back() -> None:
    run = fleet(3)
    epoch = run.state.fleet.links["r1"].generation
    run.do(cmd.break_link("r1", run.current["r1"], epoch))
    run.train()
    loaded(run)
    fed = tuple(r for r, p in publishers(run).items() if p == "p1")
    outvote(run, "p1")
    assert run.event(ev.WeightsWithdrawn).receivers == fed and "r1" not in fed
    assert not run.state.fleet.links["r1"].reload


def test_a_relay_that_died_does_not_hide_whose_weights_it_handed_on() -> None:
    run = fleet(4, ("p0", "p1", "p2"), fanout=1)
    run.train()
    loaded(run)
    assert publishers(run)["r3"] == "r0" and publishers(run)["r0"] == "p0"
    run.die("r0")
    run.failover()
    run.fill("r1", 4)
    for replica in REPLICAS:
        run.vote(replica, "wrong" if replica == "p0" else "right")
    assert run.event(ev.WeightsWithdrawn).receivers == ("r3",)
