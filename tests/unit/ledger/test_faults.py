"""Causes of faults, hosts that are to blame, and the time that each fault costs."""

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.store.ledger_follower import totals_of
from paceline.observe.faults import Fault, Faults
from paceline.observe.vocabulary import DeathCause, FaultCause
from tests.fixtures.ledgers import Driven


def join(run: Driven, worker_id: str, *, host: str = "a", pid: int = 1, kills: int = -1) -> int:
    cgroup = "/demo" if kills >= 0 else ""
    spec = {"host": host, "pid": pid, "cgroup": cgroup, "memory_kills": kills}
    return run.register(worker_id, **spec)


def die(
    run: Driven,
    worker_id: str,
    how: str = "lease",
    cause: FaultCause = FaultCause.HEARTBEAT_SILENCE,
    silent_s: float = 5.0,
) -> None:
    key = worker_id, run.current[worker_id]
    run.do(cmd.declare_dead(*key, DeathCause(how), "why", cause, silent_s))


def causes(run: Driven) -> dict[str, int]:
    return dict(run.totals.faults.by_cause)


def stopped(run: Driven, name: str, pid: int, request: str = "r1") -> None:
    run.do(cmd.record_fault(request, name, "a", pid, FaultCause.STOPPED, "stopped"))


def test_a_launchers_word_is_the_cause_and_survives_a_failover() -> None:
    run = Driven()
    join(run, "r0")
    die(run, "r0", "exit", FaultCause.OUT_OF_MEMORY)
    assert run.event(ev.WorkerDied).cause is FaultCause.OUT_OF_MEMORY
    run.failover()
    assert causes(run) == {"out_of_memory": 1}
    assert totals_of(run.snapshot()).faults == run.totals.faults


def test_a_worker_that_was_asked_to_leave_is_no_fault() -> None:
    run = Driven()
    join(run, "r0"), join(run, "r1")
    run.do(cmd.drain("q", "r0", replace=True))
    die(run, "r0", "exit", FaultCause.KILLED)
    assert run.event(ev.WorkerDied).cause is FaultCause.ASKED_TO_LEAVE
    assert run.totals.faults.count == 0


@pytest.mark.parametrize(
    ("pid", "later_s", "expected"),
    [
        (7, 5.0, {"stopped": 1}),
        (6, 0.0, {"stopped": 1, "heartbeat_silence": 1}),  # an earlier process
        (7, 20.0, {"stopped": 1, "heartbeat_silence": 1}),  # it ended before the silence
    ],
)
def test_the_stop_of_the_very_process_explains_its_silence(
    pid: int, later_s: float, expected: dict[str, int]
) -> None:
    run = Driven()
    join(run, "r0", pid=7)
    stopped(run, "r0", pid)
    run.now += later_s
    die(run, "r0", silent_s=5.0)
    assert causes(run) == expected


def test_a_launchers_word_that_comes_twice_counts_once() -> None:
    run = Driven()
    stopped(run, "redis", 9)
    stopped(run, "redis", 9)
    assert run.names() == [] and causes(run) == {"stopped": 1}
    stopped(run, "redis", 9, "r2")
    assert causes(run) == {"stopped": 2}


def test_a_process_that_comes_back_had_been_cut_off() -> None:
    run = Driven()
    join(run, "r0", pid=7)
    die(run, "r0", silent_s=5.0)
    assert causes(run) == {"heartbeat_silence": 1} and run.totals.faults.attributed == 0
    join(run, "r0", pid=7)
    assert run.event(ev.FaultExplained).cause is FaultCause.NETWORK_PARTITION
    assert causes(run) == {"network_partition": 1}


def test_another_process_of_the_name_explains_a_death_by_its_groups_count_of_kills_alone() -> None:
    run = Driven()
    join(run, "r0", pid=7, kills=2)
    die(run, "r0")
    join(run, "r0", pid=8, kills=2)
    assert causes(run) == {"heartbeat_silence": 1}
    die(run, "r0")
    join(run, "r0", pid=9, kills=3)
    assert causes(run) == {"heartbeat_silence": 1, "out_of_memory": 1}


def test_an_exit_report_that_is_slower_than_the_lease_still_tells_the_cause() -> None:
    run = Driven()
    join(run, "r0")
    die(run, "r0")
    die(run, "r0", "exit", FaultCause.CRASHED)
    assert run.names() == ["FaultExplained"] and causes(run) == {"crashed": 1}
    die(run, "r0", "exit", FaultCause.KILLED)
    assert run.names() == [], "a cause that is known stays"


def test_a_leader_that_is_succeeded_is_a_fault_whose_launcher_tells_the_cause() -> None:
    run = Driven()
    join(run, "r0")
    run.failover()
    assert causes(run) == {"unattributed": 1}
    run.do(cmd.record_fault("k", "controller-0", "a", 5, FaultCause.KILLED, "signal 9"))
    assert causes(run) == {"killed": 1}
    assert run.totals.faults.by_host == {"a": 1}


def ended(run: Driven, name: str, pid: int, cause: FaultCause = FaultCause.KILLED) -> None:
    """A launcher reports the end of a process that is not the one of that name in the ledger."""
    run.do(cmd.record_exit(name, "a", pid, cause, "signal 9"))


def test_a_process_that_ends_before_it_has_registered_is_a_fault_and_counts_once() -> None:
    run = Driven()
    ended(run, "r0", 7)
    assert run.event(ev.ProcessFault).cause is FaultCause.KILLED
    ended(run, "r0", 7)
    assert run.names() == [], "a retry, or another launcher"
    assert causes(run) == {"killed": 1}
    ended(run, "r0", 8)
    assert causes(run) == {"killed": 2}, "the next try is another process"
    run.failover()
    ended(run, "r0", 8)
    assert run.names() == [] and causes(run) == {"killed": 2}


@pytest.mark.parametrize("declared", [True, False])
def test_a_late_word_about_the_process_before_is_counted_once(declared: bool) -> None:
    """It explains the death that was declared, or is a fault if the process was replaced first."""
    run = Driven()
    join(run, "r0", pid=7)
    if declared:
        die(run, "r0")
    join(run, "r0", pid=8)
    assert causes(run) == ({"heartbeat_silence": 1} if declared else {})
    for _ in range(2):
        ended(run, "r0", 7, FaultCause.CRASHED)
        assert causes(run) == {"crashed": 1} and run.state.fleet.workers["r0"].alive
    assert run.names() == []


def test_a_registration_that_arrives_after_the_end_of_its_process_is_no_second_fault() -> None:
    run = Driven()
    ended(run, "r0", 7)
    join(run, "r0", pid=7)
    run.now += 10.0
    die(run, "r0")
    assert causes(run) == {"killed": 1}
    assert run.totals.faults.recent[0].incarnation == run.current["r0"]


def test_the_word_about_the_very_process_of_the_ledger_declares_it_dead() -> None:
    run = Driven()
    join(run, "r0", pid=7)
    ended(run, "r0", 7)
    assert run.event(ev.WorkerDied).cause is FaultCause.KILLED
    assert causes(run) == {"killed": 1} and not run.state.fleet.workers["r0"].alive


def test_an_end_that_was_asked_for_or_of_a_run_that_stops_is_no_fault() -> None:
    run = Driven()
    ended(run, "r0", 7, FaultCause.ASKED_TO_LEAVE)
    assert run.names() == [] and causes(run) == {}


# ---- the pace -------------------------------------------------------------------------------


def paced(commits: int = 10, every_s: float = 1.0) -> Faults:
    faults = Faults()
    for number in range(commits):
        commit(faults, 100.0 + number * every_s)
    return faults


def commit(faults: Faults, t: float) -> None:
    faults.take("StepCommitted", {"t": t})


def fault(t: float, name: str = "p0") -> Fault:
    return Fault(t, name, "a", 1, FaultCause.KILLED, 7)


def test_a_late_commit_costs_what_it_has_more_than_usual_and_the_fault_is_over_at_full_pace() -> (
    None
):
    faults = paced()  # the last commit at 109
    faults.add(fault(109.5))
    commit(faults, 115.0)
    assert faults.recent[0].lost_s == pytest.approx(5.0) and faults.recent[0].recovered_s < 0
    commit(faults, 116.0)
    assert faults.recent[0].recovered_s < 0, "one commit in time may be chance"
    commit(faults, 117.0)
    assert faults.recent[0].recovered_s == pytest.approx(5.5)
    assert faults.training_share == pytest.approx(12 / 17)


def test_a_loss_is_shared_by_the_faults_of_the_time() -> None:
    faults = paced()
    faults.add(fault(109.2))
    faults.add(fault(109.4, "r0"))
    commit(faults, 114.0)
    assert [f.lost_s for f in faults.recent] == pytest.approx([2.0, 2.0])
    assert faults.lost_by_cause == pytest.approx({"killed": 4.0})


def test_steps_that_a_rollback_undoes_are_lost_time() -> None:
    faults = paced()
    faults.add(fault(109.5))
    faults.take("RolledBack", {"from_step": 9, "step": 5})
    assert faults.recent[0].lost_s == pytest.approx(4.0)
    assert faults.training_share == pytest.approx(5 / 9)


def test_the_time_in_which_a_run_was_stopped_is_not_lost() -> None:
    faults = paced()
    faults.take("RunContinued", {})
    commit(faults, 5000.0)
    commit(faults, 5001.0)
    assert faults.training_share == 1.0


def test_a_cause_that_is_found_later_takes_the_lost_time_along() -> None:
    faults = paced()
    faults.add(Fault(109.5, "p0", "a", 1, FaultCause.HEARTBEAT_SILENCE, 7))
    commit(faults, 115.0)
    word = {"worker_id": "p0", "incarnation": 7, "cause": "network_partition"}
    faults.take("FaultExplained", word)
    report = faults.report()
    assert report["causes"]["network_partition"]["lost_s"] == pytest.approx(5.0)
    assert report["attributed_share"] == 1.0 and list(report["causes"]) == ["network_partition"]


def test_a_cause_of_earlier_releases_is_still_read() -> None:
    faults = Faults()
    where = {"name": "controller-0", "host": "a", "pid": 1}
    faults.take("ProcessFault", {"t": 1.0, "cause": "late", "detail": "", **where})
    assert faults.by_cause == {"late": 1}
