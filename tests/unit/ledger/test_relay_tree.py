"""Who sends weights to whom, with relays: a tree in which nobody sends to many, whoever dies or
fails."""

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.events.steps import FORGIVEN_EVERY
from controller.ledger.state.fleet import Fleet
from tests.fixtures.ledgers import Driven


def with_relays(rollouts: int, fanout: int = 2, policies: tuple[str, ...] = ("p0",)) -> Driven:
    return Driven.fleet(*policies, *(f"r{n}" for n in range(rollouts)), relay_fanout=fanout)


def publishers(run: Driven) -> dict[str, str]:
    links = run.state.fleet.links
    return {receiver: links[receiver].publisher for receiver in sorted(links)}


def copies(run: Driven) -> dict[str, int]:
    """By sender."""
    counted: dict[str, int] = {}
    for publisher in publishers(run).values():
        counted[publisher] = counted.get(publisher, 0) + 1
    return counted


def break_link(run: Driven, reporter: str, receiver: str) -> None:
    epoch = run.state.fleet.links[receiver].generation
    run.do(cmd.break_link(reporter, run.current[reporter], epoch))


def on_hosts(run: Driven, hosts: dict[str, str]) -> None:
    for worker_id, host in hosts.items():
        run.register(worker_id, host=host)
        run.observe(worker_id)
        if worker_id.startswith("p"):
            run.observe(worker_id, state=run.state.versions.version)


def test_nobody_sends_to_more_than_the_fanout() -> None:
    run = with_relays(7)
    assert copies(run) == {"p0": 2, "r0": 2, "r1": 2, "r2": 1}


def test_a_fanout_of_one_is_a_chain() -> None:
    assert publishers(with_relays(3, fanout=1)) == {"r0": "p0", "r1": "r0", "r2": "r1"}


def test_weights_come_to_each_host_once_if_its_workers_have_room() -> None:
    run = Driven(relay_fanout=2)
    on_hosts(run, {"p0": "t", "r0": "a", "r1": "b", "r2": "b", "r3": "a", "r4": "b"})
    assert publishers(run) == {"r0": "p0", "r1": "p0", "r2": "r1", "r3": "r0", "r4": "r1"}


def test_receivers_of_a_dead_relay_move_below_others() -> None:
    run = with_relays(7)
    run.die("r0")
    assert copies(run)["p0"] <= 2 and max(copies(run).values()) <= 2
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


def test_a_receiver_whose_relay_failed_gets_its_weights_from_the_replica() -> None:
    run = with_relays(3, fanout=1)
    break_link(run, "r2", "r2")
    assert publishers(run) == {"r0": "p0", "r1": "r0", "r2": "p0"}
    assert run.state.fleet.workers["r1"].relay_faults == 1


def test_a_relay_is_not_blamed_for_what_it_reports_of_its_receiver() -> None:
    run = with_relays(3, fanout=1)
    break_link(run, "r1", "r2")
    assert run.state.fleet.workers["r1"].relay_faults == 0


def test_the_replica_is_relieved_once_the_receiver_follows_again() -> None:
    run = with_relays(3, fanout=1)
    break_link(run, "r2", "r2")
    for worker in ("r0", "r1", "r2"):
        run.observe(worker, loaded=0)
    run.train()
    assert copies(run) == {"p0": 1, "r0": 1, "r1": 1}


def test_a_relay_that_fails_again_and_again_gets_no_receivers() -> None:
    run = with_relays(2, fanout=1)
    for _ in range(3):
        assert publishers(run)["r1"] == "r0"
        break_link(run, "r1", "r1")
        run.rollout("r2")  # any change of the fleet relieves the replica
        run.die("r2")
    assert publishers(run) == {"r0": "p0", "r1": "p0"}


def test_the_death_of_the_replica_costs_only_its_own_receivers_their_link() -> None:
    run = with_relays(4, fanout=1, policies=("p0", "p1"))
    before = dict(run.state.fleet.links)
    assert publishers(run) == {"r0": "p0", "r1": "p1", "r2": "r0", "r3": "r1"}
    run.die("p0")
    after = run.state.fleet.links
    assert publishers(run) == {"r0": "r3", "r1": "p1", "r2": "r0", "r3": "r1"}
    assert [r for r in after if after[r] != before[r]] == ["r0"]


def test_weights_of_an_outvoted_replica_are_withdrawn_from_all_that_hang_on_it() -> None:
    run = with_relays(4, fanout=1, policies=("p0", "p1", "p2"))
    run.train()
    for worker in ("r0", "r1", "r2", "r3"):
        run.observe(worker, loaded=1)
    run.fill("r0", 4)
    first = run.state.fleet.tree
    run.vote("p0", "wrong")
    run.vote("p1", "right")
    run.vote("p2", "right")
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
    assert max(copies(run).values()) <= 4
    assert max(_depth(run.state.fleet, worker) for worker in run.state.fleet.links) <= 5


def _depth(fleet: Fleet, receiver: str) -> int:
    link = fleet.links.get(receiver)
    return 0 if link is None else 1 + _depth(fleet, link.publisher)


def test_faults_of_a_relay_are_forgiven_one_every_few_versions() -> None:
    """An evaluation that holds a relay up now and then never bans it."""
    run = Driven.fleet("p0", "r0", "r1", "r2", checked=False, relay_fanout=1, steps=100)
    relay = run.state.fleet.workers["r1"]
    relay.relay_faults = 2
    for version in range(1, 3 * FORGIVEN_EVERY + 1):
        run.train()
        assert relay.relay_faults == max(0, 2 - version // FORGIVEN_EVERY)
