"""What the ledger knows of weights in a store: who writes them, and which ones workers read."""

from typing import Any

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from tests.fixtures.ledgers import Driven

REPLICA, OTHER = "0123456789ab", "ba9876543210"


def name(version: int, replica: str = REPLICA, publication: int = 1) -> str:
    return f"{version}-{replica}-{publication}-{'0' * 32}"


def fleet(*workers: str) -> Driven:
    return Driven.fleet(*workers, stores_weights=True)


def stores(run: Driven, worker_id: str, stored: str) -> None:
    who = worker_id, run.current[worker_id]
    worker: Any = run.state.fleet.workers[worker_id]
    version = worker.state_version
    run.do(cmd.observe(*who, worker.lifecycle, state_version=version, stored_weights=stored))


def told(run: Driven, worker_id: str) -> str:
    return str(run.directive(worker_id).stored_weights)


def test_one_replica_writes_for_all_receivers_and_another_one_goes_on_for_it() -> None:
    run = fleet("p0", "p1", "p2", "r0", "r1", "r2", "r3")
    assert {link.publisher for link in run.state.fleet.links.values()} == {"p0"}
    run.die("p0")
    assert {link.publisher for link in run.state.fleet.links.values()} == {"p1"}


def test_every_worker_is_told_the_newest_name_after_it_is_in_the_journal() -> None:
    run = fleet("p0", "r0", "r1")
    assert told(run, "r0") == ""
    stores(run, "p0", name(0))
    assert told(run, "r0") == told(run, "r1") == told(run, "p0") == name(0)
    run.train()
    stores(run, "p0", name(1))
    assert told(run, "r0") == name(1)
    # A report that was under way is older.
    stores(run, "p0", name(0))
    assert told(run, "r0") == name(1)


def test_weights_that_are_not_committed_or_not_of_the_writer_are_nobodys() -> None:
    run = fleet("p0", "p1", "r0")
    for worker_id, stored in (("p0", name(1)), ("p1", name(0)), ("r0", name(0))):
        stores(run, worker_id, stored)
    assert run.state.versions.stored == ""


def test_unreadable_weights_are_stored_again_under_another_name() -> None:
    run = fleet("p0", "r0")
    stores(run, "p0", name(0))
    generation = run.state.fleet.links["r0"].generation
    run.do(cmd.break_link("r0", run.current["r0"], generation))
    assert not run.event(ev.WeightsStored).readable
    assert run.state.fleet.links["r0"].generation > generation
    stores(run, "p0", name(0))
    assert told(run, "r0") == told(run, "p0") == ""
    stores(run, "p0", name(0, publication=2))
    assert told(run, "r0") == name(0, publication=2)


def test_weights_of_an_outvoted_replica_are_not_read() -> None:
    run = fleet("p0", "p1", "p2", "r0")
    stores(run, "p0", name(0))
    for worker_id, digest in (("p0", "wrong"), ("p1", "same"), ("p2", "same")):
        run.fill("r0", 4) if worker_id == "p0" else None
        run.vote(worker_id, digest)
    run.event(ev.WeightsWithdrawn)
    assert told(run, "r0") == ""
    assert {link.publisher for link in run.state.fleet.links.values()} == {"p1"}
    stores(run, "p1", name(run.state.versions.version, OTHER))
    assert told(run, "r0").partition("-")[2].startswith(OTHER)


def test_a_worker_that_can_read_nothing_is_heard_once_for_each_version() -> None:
    """Others need not wait for weights that are stored again and again."""
    run = fleet("p0", "r0", "r1")

    def complain(worker_id: str) -> None:
        generation = run.state.fleet.links[worker_id].generation
        run.do(cmd.break_link(worker_id, run.current[worker_id], generation))
        assert run.state.fleet.links[worker_id].generation > generation

    stores(run, "p0", name(0))
    for worker_id, publication in (("r0", 2), ("r1", 3)):
        complain(worker_id)
        assert told(run, "r0") == ""
        stores(run, "p0", name(0, publication=publication))
    for worker_id in ("r0", "r1"):
        complain(worker_id)
        assert told(run, "r0") == name(0, publication=3)
    run.failover()
    run.train()
    stores(run, "p0", name(1))
    complain("r0")
    assert told(run, "r1") == ""
