"""Registration, links, administration, terms, the run's start and end, directives."""

import pytest

from controller.ledger import Ledger, views
from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.enums import Role, SuspendStage
from controller.ledger.specs import WorkerSpec
from tests.fixtures.ledgers import Driven, group, run_spec


def register(worker_id: str, incarnation: int, state_version: int = -1) -> cmd.register:
    role = Role.POLICY if worker_id.startswith("p") else Role.ROLLOUT
    return cmd.register(
        WorkerSpec(worker_id, incarnation, role, "h", 1, "127.0.0.1", 1, state_version)
    )


def link_of(run: Driven, worker_id: str) -> ev.LinkAssigned:
    link: ev.LinkAssigned = run.state.fleet.links[worker_id]
    return link


def test_a_resumed_run_has_a_new_leader_and_no_failover() -> None:
    run = Driven.fleet("r0")
    run.failover()
    assert run.state.failovers == 1
    run.observe("r0", "stopped")
    run.failover()
    assert run.state.failovers == 1
    assert Ledger.from_snapshot(run.ledger.to_snapshot()).state.failovers == 1


def test_registering_twice_counts_once_across_a_failover() -> None:
    run = Driven()
    run.do(register("r0", 5))
    run.failover()
    run.do(register("r0", 5))
    assert run.names() == []


@pytest.mark.parametrize("replaced", [True, False])
def test_a_process_that_is_replaced_or_dead_can_do_nothing_more(replaced: bool) -> None:
    """It may only be cut off, not dead: what it sends must not count for its successor, nor what
    one sends that was declared dead."""
    run = Driven.fleet("p0", "r0")
    old = run.current["r0"]
    (lease,) = run.lease("r0").leases
    if replaced:
        run.rollout("r0")
    else:
        run.die("r0")
    for command in (
        cmd.accept("r0", old, group(lease)),
        cmd.lease("r0", old, 9, 1, 0),
        cmd.give_back("r0", old, lease.task_id, lease.attempt, "hand_back", "why"),
        cmd.observe("r0", old, "stopped"),
    ):
        with pytest.raises(cmd.CommandRefused) as refused:
            run.do(command)
        assert refused.value.code == "fenced"


def test_a_delayed_registration_of_an_earlier_incarnation_is_refused() -> None:
    run = Driven()
    run.do(register("r0", 5))
    run.do(register("r0", 6))
    assert run.event(ev.WorkerDied).incarnation == 5
    assert run.told("r0", 5) == "stopped", "it is not told to take its place back"
    run.do(cmd.declare_dead("r0", 5, "exit"))
    assert run.names() == [], "it is another process by now"
    with pytest.raises(cmd.CommandRefused) as refused:
        run.do(register("r0", 5))
    assert refused.value.code == "fenced"
    run.do(cmd.declare_dead("r0", 6, "exit"))
    with pytest.raises(cmd.CommandRefused):
        run.do(register("r0", 6))
    assert {run.told("r0", earlier) for earlier in (5, 6)} == {"rejoin"}


def test_a_state_that_was_never_committed_is_not_believed() -> None:
    run = Driven()
    run.do(register("p0", 1, state_version=3))
    assert run.state.fleet.workers["p0"].state_version == -1


def test_a_lost_commit_is_rolled_back_where_all_replicas_hold_it() -> None:
    """Redis lost the end of the journal: they hold a version that the ledger has never heard of."""
    run = Driven.fleet("p0", "p1", "r0")
    run.observe("p0", state=1)
    mesh = run.state.fleet.mesh
    assert [m.needs_state for m in mesh.members] == [True, False], "the other may hold version 0"
    run.failover()
    run.observe("p1", state=1)
    mesh = run.state.fleet.mesh
    assert mesh.restore and mesh.state_version == 2, "the lost version 1 must not be used again"
    run.observe("p0", state=1)
    assert run.state.fleet.workers["p0"].state_version == -1
    for worker_id in ("p0", "p1"):
        run.observe(worker_id, state=2)
    run.observe("r0", loaded=2)
    run.train()
    assert run.state.versions.step == 1


def test_a_lost_commit_costs_only_a_seed_where_a_replica_holds_the_state_before_it() -> None:
    run = Driven.fleet("p0", "p1", "r0")
    run.fill("r0", 4)
    run.observe("p0", state=1)
    assert run.state.versions.rollbacks == 0 and run.state.steps.open is not None
    assert [m.needs_state for m in run.state.fleet.mesh.members] == [True, False]
    run.train()
    assert run.state.versions.version == 1
    assert {run.state.fleet.workers[w].state_version for w in ("p0", "p1")} == {1}


@pytest.mark.parametrize(
    ("fault", "recorded"), [("parity", ["ParityFailed"]), ("load", ["WeightsNotLoaded"])]
)
def test_a_failure_of_weights_is_recorded_once_and_counted_across_workers(
    fault: str, recorded: list[str]
) -> None:
    run = Driven.fleet("p0", "r0", "r1")
    if fault == "load":
        run.register("r0")  # a new process: these are its first

    def failed(worker_id: str, failures: int, loaded: int = -1) -> list[str]:
        why = {f"{fault}_failures": failures, f"{fault}_detail": "out of memory"}
        state = cmd.Lifecycle.RUNNING, -1, loaded
        run.do(cmd.observe(worker_id, run.current[worker_id], *state, **why))
        return [name for name in run.names() if name != "WorkerChanged"]

    assert failed("r0", 1) == recorded
    worker = run.state.fleet.workers["r0"]
    assert worker.loaded_version == -1, "it serves nothing"
    assert worker.load_trouble == ("out of memory" if fault == "load" else "")
    assert failed("r0", 1) == [], "its next reports say the same"
    assert failed("r0", 1, loaded=0) == [] and run.names() == ["WorkerChanged"]
    assert run.state.fleet.workers["r0"].load_trouble == "", "it has loaded weights again"
    run.failover()
    assert failed("r0", 3) == recorded, "a report was lost"
    assert failed("r1", 1) == recorded
    # Its next incarnation counts from the start.
    run.rollout("r0")
    assert failed("r0", 1) == recorded
    kept = Ledger.from_snapshot(run.ledger.to_snapshot()).state.fleet
    assert kept.parity_failures == (5 if fault == "parity" else 0)


def test_an_engine_with_lost_weights_gets_others_and_no_task_until_then() -> None:
    run = Driven.fleet("p0", "r0")
    before = link_of(run, "r0").generation
    assert run.lease("r0", version=1).empty_reason == "weights"
    run.observe("r0", loaded=1)
    assert run.state.fleet.workers["r0"].loaded_version == -1
    assert link_of(run, "r0").generation == before + 1
    run.observe("r0", loaded=1)
    assert run.names() == [], "its next reports say the same"
    run.failover()
    run.observe("r0", loaded=0)
    assert run.lease("r0").leases


def test_nothing_happens_before_the_run_is_started() -> None:
    with pytest.raises(cmd.CommandRefused, match="no run"):
        register("r0", 1).execute(Ledger(), 0.0)


def test_starting_a_run_again_with_other_settings_is_refused_by_name() -> None:
    run = Driven()
    run.do(cmd.start_run(run_spec(desired={"policy": 7})))
    assert run.names() == []
    with pytest.raises(cmd.CommandRefused, match=r"group_size was 2, is 3"):
        run.do(cmd.start_run(run_spec(group_size=3)))


def test_terms_only_rise() -> None:
    run = Driven()
    run.do(cmd.begin_term(1, "controller-0"))
    assert run.names() == []
    run.do(cmd.begin_term(5, "controller-1"))
    for term, who in ((5, "controller-0"), (4, "controller-1")):
        with pytest.raises(cmd.CommandRefused):
            run.do(cmd.begin_term(term, who))


def test_an_overtaken_report_does_not_take_anything_back() -> None:
    run = Driven.fleet("p0", "r0")
    run.train()
    run.observe("p0", state=0)
    run.observe("r0", "starting", loaded=0)
    assert run.state.fleet.workers["p0"].state_version == 1
    assert run.names() == []


def test_a_draining_rollout_worker_leaves_when_it_holds_nothing() -> None:
    run = Driven.fleet("p0", "r0")
    (lease,) = run.lease("r0").leases
    run.do(cmd.drain("d", "r0", replace=True))
    assert run.told("r0") == "draining"
    run.submit("r0", lease)
    assert run.told("r0") == "stopped"
    run.observe("r0", "stopped")
    assert run.names() == ["WorkerChanged"]
    run.die("r0")
    assert run.names() == []


def test_a_replica_asked_to_leave_before_it_holds_any_state_leaves_at_once() -> None:
    run = Driven()
    run.register("p0")
    run.observe("p0")
    run.do(cmd.drain("d", "p0", replace=True))
    assert run.told("p0") == "stopped"
    run.observe("p0", "stopped")
    run.policy("p1")
    assert [m.worker_id for m in run.state.fleet.mesh.members] == ["p1"]


def test_a_worker_that_says_goodbye_hands_its_tasks_back() -> None:
    run = Driven.fleet("p0", "r0")
    (lease,) = run.lease("r0").leases
    run.observe("r0", "stopped")
    released = run.event(ev.TaskReleased)
    assert (released.task_id, released.counts) == (lease.task_id, False)


def test_cancelled_names_the_held_leases_that_moved_on() -> None:
    run = Driven.fleet("p0", "r0")
    one, two = run.lease("r0", 2).leases
    run.do(cmd.expire(one.task_id, 1))
    directive = run.directive("r0", held=[(one.task_id, 1), (two.task_id, 1)])
    assert [(x.task_id, x.attempt) for x in directive.cancelled] == [(one.task_id, 1)]


@pytest.mark.parametrize(
    "command",
    [
        cmd.scale("same", {"policy": 3}),
        cmd.drain("same", "r0", replace=True),
        cmd.pause("same", True),
        cmd.stop("same", "enough"),
        cmd.suspend("same", SuspendStage.FINISH_STEP, "Ctrl-C"),
    ],
)
def test_a_repeated_request_has_one_effect_and_one_reply_across_a_failover(
    command: cmd.Command,
) -> None:
    run = Driven.fleet("p0", "r0")
    first = run.do(command)
    assert run.names()
    run.failover()
    assert run.do(command) == first
    assert run.names() == []


# ---- evaluations and the end ---------------------------------------------------------------


def test_an_evaluation_is_never_trained_and_never_scored_twice() -> None:
    run = Driven.fleet("p0", "r0", eval_rows=2)
    one, two = run.lease("r0", 2).leases
    assert run.submit("r0", one, reward_mean=1.0).code == "accepted"
    assert run.submit("r0", one, reward_mean=1.0).code == "duplicate"
    run.submit("r0", two, reward_mean=0.0)
    assert run.event(ev.EvalRecorded).reward_mean == 0.5
    assert views.counts(run.state).dispatched == 0
    assert run.submit("r0", two).code == "duplicate"


def test_the_run_ends_only_with_the_last_checkpoint() -> None:
    run = Driven.fleet("p0", "r0", steps=1)
    run.train()
    assert run.ask("p0")[0] == "finished"
    assert not run.state.ended
    assert run.told("p0") == "running"
    run.checkpoint()
    assert run.state.ended
    assert run.told("p0") == "stopped"
    assert run.told("r9", 1) == "stopped"


def test_stop_ends_after_the_open_step_and_its_checkpoint_and_drops_the_rest_with_a_reason() -> (
    None
):
    run = Driven.fleet("p0", "r0", max_staleness=2)
    accepted = run.fill("r0", 6)[-1]
    running = run.lease("r0", 2).leases[0]
    run.do(cmd.stop("s", "enough"))
    assert views.phase(run.state) == "stopping"
    assert views.due_checkpoint(run.state) == 1
    run.vote("p0")
    assert not run.state.ended
    run.checkpoint()
    assert views.phase(run.state) == "finished"
    counts = views.counts(run.state)
    assert counts.dropped == {"run_ended": 4}
    assert run.submit("r0", accepted).code == "duplicate"
    assert run.submit("r0", running).code == "superseded"
    assert counts.dispatched == counts.trained + 4


def test_stop_after_a_rollback_accounts_for_the_groups_it_will_not_repeat() -> None:
    run = Driven.fleet("p0", "r0")
    run.train()
    run.train()
    run.die("p0")
    run.register("p0")
    run.observe("p0")
    assert views.counts(run.state).in_step == 8
    run.do(cmd.stop("s", "enough"))
    run.die("p0")
    assert views.phase(run.state) == "finished"
    assert views.counts(run.state).dropped == {"run_ended": 8}


def test_a_worker_with_other_files_than_another_is_named_with_the_settings() -> None:
    run = Driven()

    def join(worker_id: str, **origins: str) -> list[str]:
        run.register(worker_id, origins=origins)
        return run.names()

    assert "OriginsDiffer" not in join("r0", reward="1", environment="2")
    assert "OriginsDiffer" not in join("r1", reward="1", environment="2")
    assert "OriginsDiffer" not in join("p0", algorithm="1", base="1"), "it does something else"
    assert "OriginsDiffer" not in join("r2", scorer="5"), "one that says nothing is believed"
    assert "OriginsDiffer" in join("r3", reward="1", environment="3")
    differing = run.event(ev.OriginsDiffer)
    assert (differing.worker_id, differing.other) == ("r3", "r0")
    assert differing.settings == ("environment (3 here, 2 there)",) and "r3" in differing.text()
    run.failover()
    assert "OriginsDiffer" not in join("r3", reward="1", environment="2"), "it was mended"
    assert "OriginsDiffer" in join("r4", reward="1", base="2"), "the trainer has another base"
