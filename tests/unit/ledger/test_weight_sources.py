"""Who sends weights if several replicas can: each takes its share, and the others go on for one
that is lost."""

from collections import Counter

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.enums import Role
from controller.ledger.events.steps import FORGIVEN_EVERY
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
    assert not run.state.fleet.in_mesh(run.state.fleet.workers["p0"])
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
    run.do(cmd.break_link("p1", run.current["p1"], broken.generation))
    assert run.names() == [], "its other end says the same"
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


def outvote(run: Driven, wrong: str, worker_id: str = "r0") -> None:
    run.fill(worker_id, 4)
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
    break_link(run, moved, moved)
    assert publishers(run)[moved] != "p1"
    outvote(run, "p1")
    assert moved in run.event(ev.WeightsWithdrawn).receivers
    assert run.state.fleet.links[moved].reload
    assert run.state.fleet.workers[moved].loaded_version == -1


def test_what_an_outvoted_replica_sent_before_the_version_is_not_taken_back() -> None:
    run = fleet(3)
    break_link(run, "r1", "r1")
    run.train()
    loaded(run)
    fed = tuple(r for r, p in publishers(run).items() if p == "p1")
    outvote(run, "p1")
    assert run.event(ev.WeightsWithdrawn).receivers == fed and "r1" not in fed
    assert not run.state.fleet.links["r1"].reload


def test_a_relay_that_died_does_not_hide_whose_weights_it_handed_on() -> None:
    run = fleet(4, fanout=1)
    run.train()
    loaded(run)
    assert publishers(run)["r3"] == "r0" and publishers(run)["r0"] == "p0"
    run.die("r0")
    run.failover()
    outvote(run, "p0", "r1")
    assert run.event(ev.WeightsWithdrawn).receivers == ("r3",)


# ---- relays: a tree in which nobody sends to many, whoever dies or fails --------------------


def with_relays(rollouts: int, fanout: int = 2, policies: tuple[str, ...] = ("p0",)) -> Driven:
    return fleet(rollouts, policies, fanout)


def senders(run: Driven) -> Counter[str]:
    return Counter(publishers(run).values())


def break_link(run: Driven, reporter: str, receiver: str) -> None:
    epoch = run.state.fleet.links[receiver].generation
    run.do(cmd.break_link(reporter, run.current[reporter], epoch))


def on_hosts(run: Driven, hosts: dict[str, str]) -> None:
    for worker_id, host in hosts.items():
        run.register(worker_id, host=host)
        run.observe(worker_id)
        if worker_id.startswith("p"):
            run.observe(worker_id, state=run.state.versions.version)


def test_nobody_sends_to_more_than_the_fanout_and_one_is_a_chain() -> None:
    assert senders(with_relays(7)) == {"p0": 2, "r0": 2, "r1": 2, "r2": 1}
    assert publishers(with_relays(3, fanout=1)) == {"r0": "p0", "r1": "r0", "r2": "r1"}


def test_weights_come_to_each_host_once_if_its_workers_have_room() -> None:
    run = Driven(relay_fanout=2)
    on_hosts(run, {"p0": "t", "r0": "a", "r1": "b", "r2": "b", "r3": "a", "r4": "b"})
    assert publishers(run) == {"r0": "p0", "r1": "p0", "r2": "r1", "r3": "r0", "r4": "r1"}


def test_receivers_of_a_dead_relay_move_below_others() -> None:
    run = with_relays(7)
    run.die("r0")
    assert senders(run)["p0"] <= 2 and max(senders(run).values()) <= 2
    assert set(publishers(run)) == {f"r{n}" for n in range(1, 7)}


def test_a_receiver_goes_with_all_that_hang_on_it() -> None:
    run = with_relays(4, fanout=1)
    run.die("r0")
    assert publishers(run) == {"r1": "p0", "r2": "r1", "r3": "r2"}


def test_a_relay_that_leaves_gets_no_new_receivers() -> None:
    run = with_relays(1, fanout=1)
    run.observe("r0", "draining")
    run.rollout("r1")
    assert publishers(run)["r1"] == "p0"


def test_a_receiver_whose_relay_failed_follows_the_replica_until_it_has_caught_up() -> None:
    run = with_relays(3, fanout=1)
    break_link(run, "r2", "r2")
    assert publishers(run) == {"r0": "p0", "r1": "r0", "r2": "p0"}
    assert run.state.fleet.workers["r1"].relay_faults == 1
    for worker in ("r0", "r1", "r2"):
        run.observe(worker, loaded=0)
    run.train()
    assert senders(run) == {"p0": 1, "r0": 1, "r1": 1}


def test_a_relay_is_not_blamed_for_what_it_reports_of_its_receiver() -> None:
    run = with_relays(3, fanout=1)
    break_link(run, "r1", "r2")
    assert run.state.fleet.workers["r1"].relay_faults == 0


def test_a_relay_that_fails_again_and_again_gets_no_receivers() -> None:
    run = with_relays(2, fanout=1)
    for _ in range(3):
        assert publishers(run)["r1"] == "r0"
        break_link(run, "r1", "r1")
        run.rollout("r2")  # any change of the fleet relieves the replica
        run.die("r2")
    assert publishers(run) == {"r0": "p0", "r1": "p0"}


def test_weights_of_an_outvoted_replica_are_withdrawn_from_all_that_hang_on_it() -> None:
    run = with_relays(4, fanout=1, policies=REPLICAS)
    run.train()
    loaded(run)
    first = run.state.fleet.tree
    outvote(run, "p0")
    assert run.event(ev.WeightsWithdrawn).receivers == ("r0", "r3")
    links = run.state.fleet.links
    assert set(publishers(run).values()) <= {"p1", "p2", "r0", "r1", "r2"}
    assert all(link.tree > first for link in links.values())
    assert {name for name, link in links.items() if link.reload} == {"r0", "r3"}


def test_a_version_that_was_never_committed_plants_one_new_tree() -> None:
    run = with_relays(3, fanout=1)
    first = run.state.fleet.tree
    run.failover()
    run.observe("r2", loaded=5)
    planted = run.state.fleet.tree
    assert planted > first
    assert {link.tree for link in run.state.fleet.links.values()} == {planted}
    run.observe("r1", loaded=5)
    assert run.state.fleet.tree == planted, "its new link takes the version back already"


def test_a_relay_is_told_to_whom_it_sends() -> None:
    run = with_relays(3, fanout=1)
    view = run.directive("r1")
    ends = [(x.publisher.worker_id, x.receiver.worker_id, x.relayed) for x in view.links]
    assert sorted(ends) == [("r0", "r1", True), ("r1", "r2", True)]
    first = run.directive("r0")
    assert [x.relayed for x in first.links if x.receiver.worker_id == "r0"] == [False]


def test_a_tree_of_many_links_has_no_long_ways() -> None:
    run = Driven.fleet("p0", *(f"r{n}" for n in range(200)), checked=False, relay_fanout=4)
    assert max(senders(run).values()) <= 4
    assert max(depth(run, worker) for worker in run.state.fleet.links) <= 5


def depth(run: Driven, receiver: str) -> int:
    link = run.state.fleet.links.get(receiver)
    return 0 if link is None else 1 + depth(run, link.publisher)


def test_faults_of_a_relay_are_forgiven_one_every_few_versions() -> None:
    """An evaluation that holds a relay up now and then never bans it."""
    run = Driven.fleet("p0", "r0", "r1", "r2", checked=False, relay_fanout=1, steps=100)
    relay = run.state.fleet.workers["r1"]
    relay.relay_faults = 2
    for version in range(1, 3 * FORGIVEN_EVERY + 1):
        run.train()
        assert relay.relay_faults == max(0, 2 - version // FORGIVEN_EVERY)
