"""Steps, votes, deaths in the middle, checkpoints and rollbacks."""

import statistics
from pathlib import Path

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger import views
from controller.ledger.specs import StatValue
from controller.ledger.state.steps import assign_shards
from tests.fixtures.ledgers import Driven


def fleet(*policy: str, **changes: object) -> Driven:
    return Driven.fleet(*policy, "r0", **changes)


def shard_of(run: Driven, worker_id: str) -> set[str]:
    kind, plan = run.ask(worker_id)
    assert kind == "open"
    return {task.task_id for task in plan.shard}


def test_shards_are_balanced_by_tokens_and_dealt_longest_first() -> None:
    costs = [100, 10, 10, 10, 10, 60]
    assert assign_shards(costs, ["a", "b"]) == {"a": (0,), "b": (1, 2, 3, 4, 5)}
    loads = [
        sum(costs[i] for i in shard) for shard in assign_shards(costs, ["a", "b", "c"]).values()
    ]
    assert loads == [100, 60, 40]


def test_a_step_commits_only_with_the_votes_of_all_members() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    assert run.vote("p0").outcome == "pending"
    assert run.state.versions.version == 0
    assert run.vote("p0").outcome == "pending"
    run.register("p2")
    assert run.vote("p2").outcome == "retry" and run.names() == [], "it is no member"
    assert run.vote("p1") == cmd.VoteResult("committed", 1)
    assert run.names()[:2] == ["VoteCast", "StepCommitted"]
    assert views.counts(run.state).trained == 4


def test_a_late_vote_for_a_committed_step_gets_committed_after_a_failover() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    run.vote("p0")
    epoch = run.state.fleet.mesh_epoch
    run.vote("p1")
    late = {"step": 1, "mesh_epoch": epoch}
    assert run.vote("p0", **late) == cmd.VoteResult("committed", 1)
    run.failover()
    assert run.vote("p0", **late) == cmd.VoteResult("committed", 1)
    run.policy("p2")
    assert run.vote("p2", **late).outcome == "retry"


def test_a_vote_for_groups_that_the_journal_lost_with_the_opening_is_no_vote() -> None:
    """A later term has opened the step anew, in the same epoch and with other groups."""
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    step, epoch = run.state.steps.open, run.state.fleet.mesh_epoch
    assert step.term == run.state.term
    assert run.vote("p0", term=step.term + 7).outcome == "retry"
    assert run.names()[0] == "MeshBroken" and run.state.fleet.mesh_epoch > epoch
    assert run.state.steps.open.groups == step.groups, "the others may have mixed theirs in"
    run.failover()
    for name in ("p0", "p1"):
        run.vote(name, term=step.term)
    assert run.state.versions.step == 1, "the term that opened it, not the one that leads"


def test_a_vote_of_an_earlier_epoch_gets_retry() -> None:
    run = fleet("p0", "p1", "p2")
    run.fill("r0", 4)
    before = {"step": 1, "mesh_epoch": run.state.fleet.mesh_epoch}
    run.vote("p0")
    run.die("p2")
    assert run.state.steps.open.votes == {}
    assert run.vote("p0", **before).outcome == "retry"
    assert run.vote("p1", **before).outcome == "retry"
    assert run.vote("p0").outcome == "pending"
    assert run.vote("p1").outcome == "committed"


def test_a_members_death_moves_only_its_own_groups() -> None:
    run = fleet("p0", "p1", "p2", groups_per_step=9)
    run.fill("r0", 9)
    before = {p: shard_of(run, p) for p in ("p0", "p1", "p2")}
    run.die("p1")
    assert run.names()[1:] == ["WorkerDied", "MeshBroken", "MeshFormed", "StepResharded"]
    after = {p: shard_of(run, p) for p in ("p0", "p2")}
    assert before["p0"] < after["p0"] and before["p2"] < after["p2"]
    assert after["p0"] | after["p2"] == set().union(*before.values())
    assert after["p0"].isdisjoint(after["p2"])
    assert run.state.steps.open.step == 1


def test_a_diverged_minority_loses_its_state_and_the_step_goes_on() -> None:
    run = fleet("p0", "p1", "p2")
    run.fill("r0", 4)
    before = {p: shard_of(run, p) for p in ("p0", "p1", "p2")}
    run.vote("p0", "wrong")
    run.vote("p1", "right")
    assert run.vote("p2", "right").outcome == "retry"
    assert run.event(ev.MeshBroken).diverged == ("p0",)
    formed = run.event(ev.MeshFormed)
    assert [m.needs_state for m in formed.members] == [True, False, False]
    assert formed.source_rank == 1
    assert {p: shard_of(run, p) for p in before} == before
    run.observe("p0", state=0)
    assert run.state.fleet.workers["p0"].state_version == -1, "it does not know that it is wrong"
    for p in ("p0", "p1", "p2"):
        run.vote(p)
    assert run.state.fleet.workers["p0"].state_version == 1


def test_in_a_tie_the_lowest_rank_is_believed() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    run.vote("p1", "b")
    run.vote("p0", "a")
    assert run.event(ev.MeshBroken).diverged == ("p1",)


def test_a_diverged_replica_that_registers_again_is_not_believed() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    run.vote("p0", "a")
    run.vote("p1", "b")
    run.die("p0")
    run.register("p1", state_version=0)
    assert run.state.fleet.workers["p1"].state_version == -1


def test_the_death_of_all_replicas_goes_back_to_the_checkpoint_and_repeats_the_same_steps() -> None:
    run = fleet("p0", max_staleness=2)
    run.train()
    run.checkpoint()
    run.train()
    run.train()
    lost = dict(run.state.steps.history)
    run.fill("r0", 4)
    run.die("p0")
    assert "StepAborted" in run.names()
    assert views.counts(run.state).in_step == 4
    run.register("p1")
    assert run.state.versions.step == 3, "a process that is not ready decides nothing"
    run.observe("p1")
    back = run.event(ev.RolledBack)
    assert (back.step, back.version, back.from_version) == (1, 4, 3)
    formed = run.event(ev.MeshFormed)
    assert formed.restore and formed.checkpoint_path == "checkpoints/step-1-1"
    assert (formed.state_version, formed.step) == (4, 1)
    assert views.counts(run.state).in_step == 12
    run.failover()
    run.observe("p1", state=4)
    for step in (2, 3):
        assert run.state.steps.open.groups == lost[step]
        assert run.state.steps.open.replay
        assert run.vote("p1").outcome == "committed"
    assert (run.state.versions.step, run.state.versions.version) == (3, 6)
    assert run.state.steps.open.step == 4
    assert views.counts(run.state).trained == 12


def test_a_survivor_with_the_state_is_waited_for_instead_of_rolling_back() -> None:
    run = fleet("p0")
    run.train()
    run.die("p0")
    run.register("p0", state_version=1)
    run.register("p1")
    run.observe("p1")
    assert run.names() == ["WorkerChanged"]
    run.observe("p0", state=1)
    formed = run.event(ev.MeshFormed)
    members = [(m.worker_id, m.needs_state) for m in formed.members]
    assert members == [("p0", False), ("p1", True)]
    assert run.state.versions.version == 1


def test_versions_stay_readable_over_rollbacks() -> None:
    run = fleet("p0", max_staleness=4)
    run.train()
    run.checkpoint()
    for _ in range(2):
        run.train()
        run.train()
        run.die("p0")
        run.policy("p0")
    v = run.state.versions
    assert [v.step_of(x) for x in range(v.version + 1)] == [0, 1, 2, 3, 1, 2, 3, 1]
    assert [x for x in range(v.version + 1) if v.survives(x)] == [0, 1, 4, 7]
    assert v.version_of(0) == 0
    assert v.version_of(1) == 7
    assert v.version_of(3) == 9


def test_a_checkpoint_of_an_abandoned_line_is_not_recorded() -> None:
    run = fleet("p0")
    run.train()
    run.train()
    run.die("p0")
    run.policy("p0")
    who = ("p0", run.current["p0"])
    assert run.do(cmd.record_checkpoint(*who, 2, 2, "late")).useless == ("late",)
    assert run.names() == []
    assert run.state.versions.checkpoint.step == 0


def test_a_stranger_to_the_mesh_records_no_checkpoint() -> None:
    """What is recorded is what a fleet without any living state starts from."""
    run = fleet("p0")
    run.train()
    run.register("p1")
    for stranger in ("r0", "p1"):
        with pytest.raises(cmd.CommandRefused, match="no member of the mesh"):
            run.checkpoint(stranger)
    run.policy("p2")
    run.do(cmd.drain("d", "p0", True))
    run.train()
    assert [m.worker_id for m in run.state.fleet.mesh.members] == ["p2"]
    run.checkpoint("p0")  # it was writing while the others went on without it
    assert run.state.versions.checkpoint.step > 0


def test_a_stopped_run_whose_last_state_dies_ends_at_its_checkpoint() -> None:
    """Found by schedule 2059576 of the simulator: it had ended at a step that no weights are left
    of, and its mesh was formed again after that."""
    run = fleet("p0")
    run.train()
    run.checkpoint()
    run.train()
    run.do(cmd.stop("stop", "enough"))
    run.die("p0")
    assert run.state.ended and run.state.versions.step == 1
    assert dict(run.state.tasks.dropped) == {"run_ended": run.state.run.groups_per_step}
    run.do(cmd.form_mesh())
    assert run.names() == []


def test_a_member_taken_for_dead_still_records_what_it_wrote() -> None:
    """Found by schedules 1015330 and 1018360 of the simulator."""
    run = fleet("p0", "p1")
    run.train()
    run.die("p0", "lease")
    run.register("p0", state_version=run.state.versions.version)
    assert [m.worker_id for m in run.state.fleet.mesh.members] == ["p1"]
    assert run.checkpoint("p0").useless == ()
    assert run.state.versions.checkpoint.step == run.state.versions.step


def test_a_repeated_checkpoint_record_gets_the_same_answer_after_a_failover() -> None:
    run = fleet("p0")
    run.train()
    run.checkpoint()
    run.train()
    answer = run.checkpoint()
    assert (answer.older, answer.needed, answer.settled) == ((), 2, 1), (
        "the replicas have not voted on the new one yet"
    )
    assert [Path(path).name for path in answer.recorded] == ["step-1-1", "step-2-2"]
    run.failover()
    assert run.checkpoint() == answer
    assert run.names() == []
    run.train()
    answer = run.checkpoint()
    assert (answer.older, answer.needed, answer.settled) == (("checkpoints/step-1-1",), 2, 2)


def test_a_directory_of_a_settled_step_is_never_recorded_however_late_its_writer_reports() -> None:
    run = fleet("p0", "p1")
    run.train()
    run.train()
    settled = run.checkpoint("p0").settled
    run.train()
    settled = max(settled, run.checkpoint("p0").settled)
    assert settled == 2
    who = ("p1", run.current["p1"])
    late = cmd.record_checkpoint(*who, 1, 1, "checkpoints/step-1.late")
    assert run.do(late).useless == ("checkpoints/step-1.late",)
    run.failover()
    run.die("p0")
    run.die("p1")
    run.policy("p1")
    assert run.state.versions.checkpoint.step >= settled


def test_the_path_of_a_recorded_checkpoint_is_never_called_obsolete_by_a_later_step_name() -> None:
    run = fleet("p0")
    run.train()
    who = ("p0", run.current["p0"])
    run.do(cmd.record_checkpoint(*who, 1, 1, "step-1"))
    run.train()
    run.die("p0")
    run.policy("p0")
    who = ("p0", run.current["p0"])
    version = run.state.versions.version
    assert run.do(cmd.record_checkpoint(*who, 1, version, "step-1")).useless == ()


def test_a_checkpoint_asked_for_comes_before_the_regular_one_and_once() -> None:
    run = fleet("p0", checkpoint_every=4, steps=6)
    run.train()
    assert run.do(cmd.request_checkpoint("a")) == "a checkpoint will be written after step 2"
    assert run.names() == ["CheckpointRequested"]
    assert run.do(cmd.request_checkpoint("a")) == "a checkpoint will be written after step 2"
    assert run.names() == []
    run.failover()
    assert views.due_checkpoint(run.state) == 2
    run.train()
    assert views.due_checkpoint(run.state) == 2
    run.checkpoint()
    assert views.due_checkpoint(run.state) == 4


def test_joins_and_leaves_wait_for_the_end_of_the_open_step() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    epoch = run.state.fleet.mesh_epoch
    run.register("p2")
    run.observe("p2")
    run.do(cmd.drain("bye", "p1"))
    assert run.state.fleet.mesh_epoch == epoch
    assert run.told("p1") == "draining"
    run.vote("p0")
    run.vote("p1")
    assert [m.worker_id for m in run.state.fleet.mesh.members] == ["p0", "p2"]
    assert run.told("p1") == "stopped"
    assert run.state.fleet.mesh.members[1].needs_state


def test_the_last_holder_of_the_state_drains_only_once_another_has_it() -> None:
    run = fleet("p0")
    run.train()
    run.do(cmd.drain("bye", "p0", replace=True))
    assert [m.worker_id for m in run.state.fleet.mesh.members] == ["p0"]
    run.train()
    run.register("p1")
    run.observe("p1")
    assert [m.worker_id for m in run.state.fleet.mesh.members] == ["p0", "p1"]
    assert run.state.fleet.mesh.source_rank == 0
    run.observe("p1", state=2)
    assert [m.worker_id for m in run.state.fleet.mesh.members] == ["p1"]
    assert run.state.versions.rollbacks == 0


def test_a_replica_of_an_epoch_that_the_journal_lost_is_sent_out_of_the_one_with_its_number() -> (
    None
):
    """Else it would wait for a plan for ever: it takes the new epoch for the one that it has
    formed."""
    run = fleet("p0")
    run.train()
    run.die("p0")
    run.policy("p1")
    mesh = run.state.fleet.mesh
    assert mesh.restore and mesh.state_version == 2
    assert run.ask("p1", version=2)[0] == "open"
    assert run.ask("p1", version=1)[0] == "epoch_over"


def test_a_failed_collective_ends_the_epoch_for_all_and_kills_nobody() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    epoch = run.state.fleet.mesh_epoch
    run.do(cmd.break_mesh("p0", run.current["p0"], epoch, "connection reset"))
    for p in ("p0", "p1"):
        assert not run.directive(p).HasField("mesh")
        assert run.ask(p, epoch, 0)[0] == "epoch_over"
    run.do(cmd.break_mesh("p1", run.current["p1"], epoch, "too"))
    assert run.names() == []
    run.do(cmd.form_mesh())
    assert run.names() == ["MeshFormed", "StepResharded"]
    run.do(cmd.form_mesh())
    assert run.names() == []
    assert run.vote("p0").outcome == "pending"
    assert run.vote("p1").outcome == "committed"


def test_a_joiner_that_never_got_the_state_cannot_carry_the_step() -> None:
    run = fleet("p0")
    run.register("p1")
    run.observe("p1")
    run.fill("r0", 4)
    assert len(run.state.fleet.mesh.members) == 2
    run.die("p0")
    assert "StepAborted" in run.names()
    assert run.event(ev.MeshFormed).restore


def test_a_step_has_no_rate_if_the_clock_was_set_back_meanwhile() -> None:
    """It would be a million million tokens a second, on every chart."""
    run = fleet("p0")
    run.now += 2.0
    run.train()
    run.fill("r0", 4, tokens=10)
    run.now -= 3600.0
    run.vote("p0")
    metrics = run.event(ev.StepCommitted).metrics
    assert metrics["tokens"] == 40
    assert not {"step_s", "tokens_per_s", "samples_per_s"} & metrics.keys()


def test_statistics_of_replicas_become_those_of_all_values() -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 4)
    rewards = {"p0": [0.0, 1.0, 1.0], "p1": [3.0]}
    weights = {"p0": [1.0, 1.0, 2.0], "p1": [0.5]}
    returns = {"p0": [1.0, 0.0, 2.0], "p1": [5.0]}
    errors = {"p0": [0.5, -0.5, 0.5], "p1": [3.0]}
    for replica in ("p0", "p1"):
        columns = {
            "reward{}/exact": rewards[replica],
            "ratio{}": weights[replica],
            "return{}": returns[replica],
            "value_error{}": errors[replica],
        }
        stats = {}
        for name, column in columns.items():
            mean = "_mean" if name == "return{}" else ""
            stats[name.format(mean)] = StatValue(sum(column), len(column), max(column))
            squares = [x * x for x in column]
            stats[name.format("_square")] = StatValue(sum(squares), len(column), max(squares))
        run.vote(replica, stats=stats)
    metrics = run.event(ev.StepCommitted).metrics
    every = {
        name: [*column["p0"], *column["p1"]]
        for name, column in {"r": rewards, "w": weights, "v": returns, "e": errors}.items()
    }
    assert metrics["reward/exact"] == pytest.approx(1.25)
    assert metrics["reward/exact/std"] == pytest.approx(statistics.stdev(every["r"]))
    assert metrics["ess"] == pytest.approx(4.5**2 / (4 * 6.25))
    unexplained = statistics.pvariance(every["e"]) / statistics.pvariance(every["v"])
    assert metrics["explained_variance"] == pytest.approx(1 - unexplained)
    assert metrics["return_mean"] == pytest.approx(2.0)
    assert not [name for name in metrics if "square" in name or "value_error" in name]


def test_votes_are_merged_exactly_into_the_steps_metrics() -> None:
    run = fleet("p0", "p1")
    run.now += 2.0
    run.fill("r0", 3, tokens=30)
    run.fill("r0", 1, tokens=10, reward_mean=0.9, reward_std=0.1)
    first = {"loss": StatValue(6.0, 3.0, 9.0), "ratio": StatValue(2.0, 2.0, 1.5)}
    second = {"loss": StatValue(2.0, 1.0, 2.0), "ratio": StatValue(4.0, 2.0, 3.5)}
    run.vote("p0", stats=first)
    run.vote("p1", stats=second)
    metrics = run.event(ev.StepCommitted).metrics
    assert metrics["loss"] == 2.0
    assert metrics["ratio_mean"] == 1.5 and metrics["ratio_max"] == 3.5
    assert metrics["reward_mean"] == pytest.approx((3 * 0.5 + 0.9) / 4)
    squares = (3 * 0.5**2 + 0.1**2) + 2 * (3 * 0.1**2 + 0.3**2)
    assert metrics["reward_std"] == pytest.approx((squares / 7) ** 0.5)
    assert metrics["tokens"] == 100 and metrics["samples"] == 8
    assert metrics["step_s"] == pytest.approx(2.0)
    assert metrics["tokens_per_s"] == pytest.approx(50.0)
    assert metrics["replicas"] == 2


SKIPPED = {"update_skipped": StatValue(1.0, 1.0, 1.0)}
APPLIED = {"update_skipped": StatValue(0.0, 1.0, 0.0)}


@pytest.mark.parametrize(
    ("limit", "votes", "failed"),
    [
        (3, [APPLIED, SKIPPED, SKIPPED, SKIPPED], True),
        (3, [SKIPPED, SKIPPED, APPLIED, SKIPPED, SKIPPED, APPLIED], False),
        (0, [SKIPPED] * 12, False),
    ],
)
def test_so_many_steps_without_a_finite_gradient_in_a_row_fail_the_run(
    limit: int, votes: list[dict[str, StatValue]], failed: bool
) -> None:
    """A step that changes weights starts the count again; without a limit the run goes on."""
    run = Driven.fleet("p0", "p1", "r0", steps=30, max_nonfinite_steps=limit)
    for stats in votes:
        assert run.state.phase == "open"
        run.failover()
        run.observe("r0", loaded=run.state.versions.version)
        run.fill("r0", 4)
        run.vote("p0", stats=stats)
        run.vote("p1", stats=stats)
    assert run.state.phase == ("failed" if failed else "open")
    if failed:
        assert "3 steps in a row were not finite, from step 2 on" in run.state.reason
        assert run.names()[-1] == "RunFailed"
