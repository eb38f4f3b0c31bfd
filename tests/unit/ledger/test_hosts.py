"""Hosts that are blamed for the faults of their workers, and get no new work until they are let in
again."""

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.ledger import Ledger
from paceline.observe.vocabulary import DeathCause, FaultCause
from tests.fixtures.ledgers import Driven

APART_S = 600.0


def fleet(hosts: int = 4, replicas: int = 1, **changes: object) -> Driven:
    """A run with a replica on host p and a rollout worker on each of the hosts h0, h1, ..."""
    run = Driven(max_staleness=8, **changes)
    for n in range(replicas):
        run.register(f"p{n}", host="p" if not n else f"p{n}")
    for n in range(hosts):
        run.register(f"r{n}", host=f"h{n}", pid=n + 1)
    for n in range(replicas):
        run.observe(f"p{n}")
    for n in range(hosts):
        run.observe(f"r{n}", loaded=0)
    return run


def die(
    run: Driven, worker: str, cause: FaultCause = FaultCause.CRASHED, later: float = APART_S
) -> None:
    """It dies of ``cause`` and comes back, on the same host."""
    run.now += later
    host, pid = run.state.fleet.workers[worker].host, run.state.fleet.workers[worker].pid
    key = worker, run.current[worker]
    run.do(cmd.declare_dead(*key, DeathCause.EXIT, "why", cause))
    run.register(worker, host=host, pid=pid + 1000)
    run.observe(worker, loaded=0 if worker.startswith("r") else -1)


def blocked(run: Driven) -> list[str]:
    return [name for name, host in run.state.fleet.hosts.by_name.items() if host.blocked]


def test_the_third_fault_blocks_the_host_and_a_new_leader_knows_it() -> None:
    run = fleet()
    die(run, "r1"), die(run, "r1", FaultCause.WEDGED)
    assert blocked(run) == [] and run.lease("r1").leases
    die(run, "r1", FaultCause.HEARTBEAT_SILENCE)
    assert blocked(run) == ["h1"]
    assert run.lease("r1").empty_reason == "blocked"
    run.failover()
    assert blocked(run) == ["h1"] and run.lease("r1").empty_reason == "blocked"
    assert run.lease("r0").leases


def test_a_blocked_host_survives_a_snapshot() -> None:
    run = fleet()
    run.do(cmd.block_host("q", "h1"))
    again = Ledger.from_snapshot(run.ledger.to_snapshot())
    assert again.state.fleet.shuns(again.state.fleet.workers["r1"])
    assert not again.state.fleet.shuns(again.state.fleet.workers["r0"])


def test_a_leader_that_died_between_blame_and_block_is_succeeded_by_one_that_blocks() -> None:
    run = fleet()
    for _ in range(2):
        die(run, "r1")
    run.now += APART_S
    died = ev.WorkerDied(
        "r1", run.current["r1"], DeathCause.EXIT, "", FaultCause.CRASHED, t=run.now
    )
    run.ledger.emit(died)  # and nothing that follows from it
    assert blocked(run) == []
    run.do(cmd.begin_term(9, "controller-1"))
    run.register("r1", host="h1")
    assert blocked(run) == ["h1"]


def test_let_in_again_it_works_and_its_old_faults_do_not_count() -> None:
    run = fleet()
    for _ in range(3):
        die(run, "r1")
    assert "works again" not in run.do(cmd.allow_host("q", "h1"))
    assert run.do(cmd.allow_host("q", "h1")) == "host h1 gets work again"  # a repeat
    assert run.lease("r1").leases
    die(run, "r1"), die(run, "r1")
    assert blocked(run) == []


def test_one_fault_counts_once_however_often_it_is_told() -> None:
    run = fleet()
    for _ in range(3):
        run.now += APART_S
        run.do(cmd.record_exit("r1", "h1", 77, FaultCause.ERROR))  # it failed to start
    key = "r1", run.current["r1"]
    for cause in (FaultCause.HEARTBEAT_SILENCE, FaultCause.CRASHED):
        run.now += APART_S
        run.do(cmd.declare_dead(*key, DeathCause.EXIT, "why", cause))
    assert len(run.state.fleet.hosts.by_name["h1"].faults) == 2


def test_a_host_that_takes_all_its_workers_along_has_one_fault() -> None:
    run = fleet()
    for n in range(5):
        run.register(f"r1{n}", host="h1", pid=100 + n)
    for n in range(5):
        die(run, f"r1{n}", FaultCause.HOST_LOST, later=1.0)
    assert blocked(run) == []


@pytest.mark.parametrize("cause", [FaultCause.KILLED, FaultCause.UNATTRIBUTED])
def test_what_is_not_the_hosts_fault_does_not_count(cause: FaultCause) -> None:
    run = fleet()
    for _ in range(5):
        die(run, "r1", cause)
    assert blocked(run) == []


def test_silence_that_is_explained_by_a_kill_is_taken_back() -> None:
    run = fleet()
    key = "r1", run.current["r1"]
    run.do(cmd.declare_dead(*key, DeathCause.LEASE, "", FaultCause.HEARTBEAT_SILENCE))
    assert run.state.fleet.hosts.by_name["h1"].faults
    run.do(cmd.declare_dead(*key, DeathCause.EXIT, "", FaultCause.KILLED))
    assert not run.state.fleet.hosts.by_name["h1"].faults


def test_a_host_blocked_for_a_fault_that_was_none_of_its_own_is_let_in_again() -> None:
    """Silence is noticed first, and its launcher tells a little later that somebody killed it."""
    run = fleet()
    die(run, "r1"), die(run, "r1")
    run.now += APART_S
    key = "r1", run.current["r1"]
    run.do(cmd.declare_dead(*key, DeathCause.LEASE, "", FaultCause.HEARTBEAT_SILENCE))
    assert blocked(run) == ["h1"]
    run.do(cmd.declare_dead(*key, DeathCause.EXIT, "", FaultCause.KILLED))
    assert blocked(run) == []
    run.register("r1", host="h1", pid=99)
    run.observe("r1", loaded=0)
    assert run.lease("r1").leases
    die(run, "r1")
    assert blocked(run) == ["h1"], "its two real faults count on"


def test_faults_of_long_ago_do_not_count() -> None:
    run = fleet(bounds={"host_window_s": 1000})
    for _ in range(6):
        die(run, "r1", later=900.0)
    assert blocked(run) == []


def test_it_can_be_turned_off() -> None:
    run = fleet(bounds={"host_faults": 0})
    for _ in range(6):
        die(run, "r1")
    assert blocked(run) == []


def test_a_task_that_kills_its_workers_is_not_the_hosts_fault() -> None:
    run = fleet(max_attempts=5)
    for worker in ("r0", "r1", "r0", "r0", "r0"):
        run.lease(worker, 1)
        die(run, worker)
    assert blocked(run) == []


def test_a_run_on_one_host_never_blocks_itself() -> None:
    run = Driven.fleet("p0", "r0", "r1")
    for _ in range(5):
        die(run, "r0"), die(run, "r1"), die(run, "p0")
    assert blocked(run) == []
    assert not any(event["type"].startswith("Host") for event in run.journal)


def test_the_only_host_of_a_role_is_kept_and_people_are_told_once() -> None:
    run = fleet()
    for _ in range(5):
        die(run, "p0")
    assert blocked(run) == []
    told = [event for event in run.journal if event["type"] == "HostKept"]
    assert [event["host"] for event in told] == ["p"]
    assert "no other host has a policy worker at work" in told[0]["why"]


def test_a_fault_of_all_hosts_blocks_a_quarter_of_them() -> None:
    run = fleet(hosts=8)
    for _ in range(4):
        for n in range(8):
            die(run, f"r{n}")
    assert len(blocked(run)) == 2


def test_a_blocked_host_works_again_once_nobody_else_is_left() -> None:
    run = fleet(hosts=2)
    run.do(cmd.block_host("q", "h1"))
    assert run.lease("r1").empty_reason == "blocked"
    run.die("r0")
    assert run.lease("r1").leases


def test_what_its_workers_hold_is_finished() -> None:
    run = fleet()
    (lease,) = run.lease("r1").leases
    run.do(cmd.block_host("q", "h1"))
    assert run.submit("r1", lease).code == "accepted"
    assert run.lease("r1").empty_reason == "blocked"


def test_its_replica_leaves_the_mesh_after_the_step_and_joins_again() -> None:
    run = fleet(replicas=2)
    assert run.state.fleet.mesh.names == ["p0", "p1"]
    run.do(cmd.block_host("q", "p1"))
    assert run.state.fleet.mesh.names == ["p0"]
    run.do(cmd.allow_host("q2", "p1"))
    assert run.state.fleet.mesh.names == ["p0", "p1"]


def test_a_spare_takes_the_place_of_a_worker_of_a_blocked_host() -> None:
    run = fleet(hosts=3, desired={"policy": 1, "rollout": 2}, bounds={"rollout_spares": 1})
    assert run.state.fleet.workers["r2"].spare
    run.do(cmd.block_host("q", "h0"))
    assert not run.state.fleet.workers["r2"].spare


def test_people_may_not_block_what_is_needed_or_not_there() -> None:
    run = fleet()
    for host, why in (("p", "no other host has a policy worker"), ("x", "no worker was on host")):
        with pytest.raises(cmd.CommandRefused, match=why):
            run.do(cmd.block_host("q", host))


def test_a_worker_that_crashes_every_half_minute_has_its_host_blocked() -> None:
    run = fleet()
    for _ in range(7):
        die(run, "r1", later=30.0)
    assert blocked(run) == ["h1"]


def test_hosts_that_have_left_take_no_share() -> None:
    run = fleet()
    for _ in range(3):
        die(run, "r1")
    run.register("r1", host="h9")  # the machine is replaced
    run.observe("r1", loaded=0)
    for _ in range(3):
        die(run, "r2")
    assert blocked(run) == ["h1", "h2"]
