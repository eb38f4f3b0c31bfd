"""Groups that kill trainers, or that do not fit into one: the step goes on without them."""

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger import views
from controller.ledger.decisions.rejections import MOST_REJECTIONS
from controller.ledger.enums import GroupFault
from controller.ledger.state.tasks import TaskState
from tests.fixtures.ledgers import Driven


def fleet(*policy: str, **changes: object) -> Driven:
    return Driven.fleet(*policy, "r0", **{"max_staleness": 2, **changes})


def reject(run: Driven, worker_id: str, *tasks: str, fault: str = "out_of_memory") -> int:
    step = run.state.steps.open.step if run.state.steps.open else run.state.versions.step + 1
    named = {t: run.state.tasks.records[t].attempt for t in tasks}
    who = (worker_id, run.current[worker_id])
    left: int = run.do(cmd.reject(*who, step, named, GroupFault(fault), "why"))
    return left


def try_group(run: Driven, worker_id: str, task_id: str) -> bool:
    step = run.state.steps.open
    who = (worker_id, run.current[worker_id])
    stands: bool = run.do(cmd.try_group(*who, step.step, run.state.fleet.mesh_epoch, task_id))
    return stands


def shard_of(run: Driven, worker_id: str) -> tuple[str, ...]:
    found: tuple[str, ...] = run.state.steps.open.shard(worker_id)
    return found


def back(run: Driven, worker_id: str) -> None:
    """The replica is started again and restores, or receives, the state."""
    run.register(worker_id)
    run.observe(worker_id)
    run.observe(worker_id, state=run.state.versions.version)


def suspects_in_plan(run: Driven, worker_id: str) -> list[str]:
    _, plan = run.ask(worker_id)
    return [x.task_id for x, g in zip(plan.shard, plan.groups, strict=True) if g.suspect]


def test_a_group_that_a_trainer_names_leaves_the_step_and_the_others_are_trained() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 5, lengths=(7, 13))
    epoch = run.state.fleet.mesh_epoch
    bad = shard_of(run, "p1")[0]
    others = set(run.state.steps.open.groups) - {bad}
    assert reject(run, "p1", bad) == 1
    dropped = run.event(ev.TaskDropped)
    assert (dropped.reason, dropped.detail) == ("out_of_memory", "p1: why")
    assert dropped.group.whole_lengths == (12, 18), "prompt included"
    assert "sequences of 12 and 18 tokens" in dropped.text()
    step = run.state.steps.open
    assert (step.step, set(step.groups)) == (1, others | {"t4"})
    assert step.mesh_epoch > epoch, "votes for the former composition must count for nothing"
    run.vote("p0")
    run.vote("p1")
    assert run.state.versions.step == 1
    assert views.counts(run.state).dropped == {"out_of_memory": 1}


def test_a_vote_for_the_former_composition_does_not_commit_the_new_one() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 5)
    former = {"step": 1, "mesh_epoch": run.state.fleet.mesh_epoch}
    run.vote("p0")
    reject(run, "p1", shard_of(run, "p1")[0])
    assert run.vote("p0", **former).outcome == "retry"
    assert run.vote("p1", **former).outcome == "retry"
    assert run.state.steps.open.votes == {}


def test_a_report_that_is_late_repeated_or_of_another_members_group_drops_nothing() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 5)
    bad, other = shard_of(run, "p1")[0], shard_of(run, "p0")[0]
    assert reject(run, "p1", other) == 0
    who = ("p1", run.current["p1"])
    fault = GroupFault.OUT_OF_MEMORY
    assert run.do(cmd.reject(*who, 1, {bad: 7}, fault)) == 0, "another attempt"
    command = cmd.reject(*who, 1, {bad: 1}, fault)
    assert run.do(command) == 1
    assert run.do(command) == 0
    run.vote("p0")
    run.vote("p1")
    assert run.do(command) == 0
    assert views.counts(run.state).dropped == {"out_of_memory": 1}


def test_a_step_that_misses_a_group_gets_one_although_later_steps_have_theirs() -> None:
    run = fleet("p0", max_staleness=0)
    for _ in range(2):
        run.train()
    run.die("p0")
    back(run, "p0")
    run.observe("p0", state=run.state.versions.version)
    assert run.state.versions.step == 0 and len(run.state.steps.replay) == 1
    run.observe("r0", loaded=run.state.versions.version)
    first = run.state.steps.open.groups
    reject(run, "p0", first[1])
    (lease,) = run.lease("r0", 4).leases
    assert run.lease("r0", 4).leases == (), "as many as are missing"
    run.submit("r0", lease, run.state.versions.version)
    assert set(run.state.steps.open.groups) == {*first, lease.task_id} - {first[1]}


@pytest.mark.parametrize("policy", [("p0",), ("p0", "p1")])
def test_the_group_that_kills_trainers_leaves_after_max_attempts_deaths(
    policy: tuple[str, ...],
) -> None:
    run = fleet(*policy)
    run.fill("r0", 4)
    culprit, deaths = "t1", 0
    for _ in range(12):
        if culprit not in run.state.tasks.records:
            break
        killer = next(p for p in policy if culprit in shard_of(run, p))
        for task_id in suspects_in_plan(run, killer):
            assert try_group(run, killer, task_id)
            if task_id == culprit:
                break
        run.die(killer)
        deaths += 1
        run.failover()
        back(run, killer)
    assert deaths == run.state.run.max_attempts == 3
    assert views.counts(run.state).dropped == {"killed_trainers": 1}
    run.fill("r0", 1)
    for member in run.state.fleet.mesh.members:
        run.vote(member.worker_id)
    assert set(run.state.steps.history[1]) == {"t0", "t2", "t3", "t4"}


def test_kills_from_outside_cost_no_group() -> None:
    """They hit groups that were computed by themselves once at most, and trainers that wait."""
    run = fleet("p0")
    run.fill("r0", 4)
    for n in range(12):
        suspects = [*suspects_in_plan(run, "p0"), *[""] * 12]
        if n:
            assert try_group(run, "p0", suspects[n - 1])
        run.die("p0")
        back(run, "p0")
    for _ in range(5):  # before it has begun with the suspects
        run.die("p0")
        back(run, "p0")
    assert views.counts(run.state).dropped == {}


def test_a_trainer_that_dies_after_its_vote_or_was_asked_to_leave_blames_nobody() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    run.vote("p1")
    run.die("p1")
    assert run.state.steps.suspects == {}
    back(run, "p1")
    run.do(cmd.drain("d", "p0"))
    run.die("p0")
    assert run.state.steps.suspects == {}


def test_a_trained_group_is_no_suspect_any_more() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    run.die("p1")
    assert suspects_in_plan(run, "p0")
    run.vote("p0")
    assert run.state.steps.suspects == {}


def test_a_trial_counts_only_in_its_epoch_and_for_the_members_own_groups() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    mine, other = shard_of(run, "p0")[0], shard_of(run, "p1")[0]
    assert try_group(run, "p0", mine) and not try_group(run, "p0", other)
    late = cmd.try_group("p0", run.current["p0"], 1, run.state.fleet.mesh_epoch, mine)
    run.die("p1")
    assert run.do(late) is False
    assert run.state.steps.open.trials == {}


def test_a_fault_of_every_group_ends_the_run_with_a_reason() -> None:
    run = fleet("p0", max_staleness=9)
    for _ in range(MOST_REJECTIONS):
        while run.state.steps.open is None:
            run.fill("r0", 1)
        reject(run, "p0", run.state.steps.open.groups[0], fault="out_of_memory")
    assert run.state.phase == "failed"
    assert "could not be trained" in run.state.reason and "out_of_memory" in run.state.reason


def test_a_commit_forgives_earlier_rejections() -> None:
    run = fleet("p0", max_staleness=9)
    for _ in range(MOST_REJECTIONS + 5):
        if run.state.versions.step >= run.state.run.steps - 1:
            break
        while run.state.steps.open is None:
            run.fill("r0", 1)
        reject(run, "p0", run.state.steps.open.groups[0])
        while run.state.steps.open is None:
            run.fill("r0", 1)
        run.vote("p0")
    assert run.state.phase == "open"


# ---- groups whose payload is lost or wrong: they are generated again, and counted as new ------


@pytest.mark.parametrize("fault", ["payload_lost", "payload_invalid"])
def test_a_lost_group_is_leased_again_before_any_new_one(fault: str) -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 5, lengths=(7, 13))
    epoch = run.state.fleet.mesh_epoch
    bad = shard_of(run, "p1")[0]
    run.ledger.take_garbage()
    assert reject(run, "p1", bad, fault=fault) == 1
    assert run.ledger.take_garbage() == [(bad, 1)], "what the store still has of it"
    lost = run.event(ev.GroupLost)
    assert (lost.task_id, lost.attempt, lost.fault, lost.worker_id) == (bad, 1, fault, "r0")
    assert lost.detail == "p1: why", "who found it"
    assert lost.lengths == (12, 18), "prompt included"
    assert "sequences of 12 and 18 tokens" in lost.text()
    task = run.state.tasks.records[bad]
    assert (task.state, task.group) == (TaskState.PENDING, None)
    assert views.counts(run.state).dropped == {}
    assert run.state.steps.open.mesh_epoch > epoch, "votes for the former composition are void"
    (lease,) = run.lease("r0", 1).leases
    assert (lease.task_id, lease.attempt) == (bad, 2)


@pytest.mark.parametrize("lost", [("t2",), ("t0", "t1", "t2", "t3")])
def test_groups_that_are_lost_are_trained_once_they_were_generated_again(
    lost: tuple[str, ...],
) -> None:
    run = fleet("p0", max_staleness=0)
    run.fill("r0", 4)
    assert reject(run, "p0", *lost, fault="payload_lost") == len(lost)
    assert run.state.steps.open is None, "it misses a group"
    run.fill("r0", len(lost))
    assert set(run.state.steps.open.groups) == {"t0", "t1", "t2", "t3"}
    run.vote("p0")
    assert run.state.versions.step == 1
    assert run.state.tasks.records["t2"].group.attempt == 2


def test_a_group_that_is_lost_again_and_again_is_dropped_with_the_reason() -> None:
    run = fleet("p0", max_staleness=0)
    run.fill("r0", 4)
    for _ in range(run.state.run.max_attempts - 1):
        reject(run, "p0", "t2", fault="payload_lost")
        run.fill("r0", 1)
    reject(run, "p0", "t2", fault="payload_lost")
    assert views.counts(run.state).dropped == {"payload_lost": 1}
    assert "t2" not in run.state.tasks.records
