"""Tasks whose owners died: which of them was the reason is found out, and only that one pays for
it."""

import random

import pytest

from controller.ledger import Ledger, views
from controller.ledger import decisions as cmd
from controller.ledger.state.fleet import Fleet, Worker
from controller.ledger.state.tasks import SUSPECT_DEATHS
from testbed.simulator.cluster import Shape
from testbed.simulator.world import World
from tests.fixtures.ledgers import Driven, run_spec


@pytest.fixture
def run() -> Driven:
    return Driven.fleet("p0", "r0", "r1", max_staleness=4)


def ids(result: cmd.LeaseResult) -> list[str]:
    return [lease.task_id for lease in result.leases]


def lose(run: Driven, worker_id: str, count: int, how: str = "exit") -> list[str]:
    """Tasks that were held by a worker that died, and is back."""
    lost = ids(run.lease(worker_id, count))
    run.die(worker_id, how)
    run.rollout(worker_id)
    return lost


def make_suspects(run: Driven, count: int) -> list[str]:
    """``count`` tasks that as many owners died with as it takes."""
    lost = [lose(run, "r0", count) for _ in range(SUSPECT_DEATHS)]
    assert lost[0] == lost[-1]
    return lost[0]


def test_deaths_in_company_never_quarantine_anybody(run: Driven) -> None:
    for _ in range(20):
        leases = run.lease("r0", 2).leases
        if len(leases) == 1:  # a suspect, alone: it succeeds
            run.submit("r0", leases[0])
        else:
            run.die("r0")
            run.rollout("r0")
    assert views.counts(run.state).dropped == {}


def test_one_death_changes_nothing_for_those_that_were_held(run: Driven) -> None:
    lost = lose(run, "r0", 3)
    assert ids(run.lease("r1", 4)) == [*lost, "t3"]


def test_a_suspect_is_leased_alone_and_the_others_go_on(run: Driven) -> None:
    suspects = make_suspects(run, 3)
    assert ids(run.lease("r0", 5)) == suspects[:1]
    assert run.lease("r0", 5).empty_reason == "isolated"
    assert ids(run.lease("r1", 2)) == ["t3", "t4"], "other workers take no suspect and do not wait"


def test_a_worker_that_holds_something_runs_empty_for_a_suspect(run: Driven) -> None:
    busy = run.lease("r0", 2).leases
    for _ in range(SUSPECT_DEATHS):
        lost = lose(run, "r1", 2)
    assert run.lease("r0", 1).empty_reason == "isolated"
    run.submit("r0", busy[0])
    assert run.lease("r0", 1).empty_reason == "isolated"
    run.submit("r0", busy[1])
    assert ids(run.lease("r0", 4)) == lost[:1]


def test_a_suspect_that_has_finished_makes_no_request_dearer(run: Driven) -> None:
    """Its record stays until a checkpoint covers it, which may be hours."""
    make_suspects(run, 1)
    lease = run.lease("r0", 1).leases[0]
    assert list(run.state.tasks.suspects) == [lease.task_id]
    run.submit("r0", lease)
    assert lease.task_id in run.state.tasks.records and not run.state.tasks.suspects


def test_a_request_beside_a_suspect_does_not_look_at_the_whole_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Driven.fleet("p0", *(f"r{n}" for n in range(50)), max_staleness=4)
    make_suspects(run, 1)
    looked_at: list[Worker] = []
    monkeypatch.setattr(Fleet, "seated", lambda _, worker: looked_at.append(worker) or True)
    assert ids(run.lease("r49", 1)) == ["t1"]
    assert len(looked_at) < 5


def test_the_guilty_one_is_found_and_the_innocent_are_trained(run: Driven) -> None:
    suspects = make_suspects(run, 3)
    guilty = suspects[1]
    tried = []
    while len(leases := run.lease("r0", 8).leases) == 1:
        tried.append(leases[0].task_id)
        if leases[0].task_id == guilty:
            run.die("r0")
            run.rollout("r0")
        else:
            assert run.submit("r0", leases[0]).code == "accepted"
    assert tried == [suspects[0], guilty, guilty, guilty, suspects[2]], "fleet.max_attempts = 3"
    assert views.counts(run.state).dropped == {"quarantined": 1}
    assert views.counts(run.state).ready == 2


def test_a_suspect_that_is_finished_is_cleared(run: Driven) -> None:
    make_suspects(run, 1)
    (lease,) = run.lease("r0", 4).leases
    assert run.submit("r0", lease).code == "accepted"
    assert len(run.lease("r0", 4).leases) == 4, "nothing is leased alone any more"


@pytest.mark.parametrize("how", ["drained", "draining", "stopped"])
def test_the_death_of_a_worker_that_was_told_to_leave_blames_nobody(run: Driven, how: str) -> None:
    for _ in range(5):
        lost = run.lease("r0", 1).leases
        if how == "drained":
            run.do(cmd.drain(f"drain-{run.incarnations}", "r0", replace=True))
        else:
            run.observe("r0", how)
        run.die("r0")
        run.rollout("r0")
    (task,) = run.state.tasks.records.values()
    assert (task.task_id, task.deaths, task.failures) == (lost[0].task_id, 0, ())


def test_prompts_of_an_evaluation_are_suspected_like_any_other() -> None:
    run = Driven.fleet("p0", "r0", "r1", eval_rows=3, eval_every=1)
    assert make_suspects(run, 3) == ["e0.0", "e0.1", "e0.2"]
    assert ids(run.lease("r1", 2)) == ["t0", "t1"]
    for row in range(3):
        (lease,) = run.lease("r0", 8).leases
        assert lease.task_id == f"e0.{row}"
        run.submit("r0", lease)
    assert not run.state.evals.rounds, "the round is complete"


def test_suspicion_survives_failover_and_snapshot(run: Driven) -> None:
    suspects = make_suspects(run, 2)
    run.failover()
    copy = Ledger.from_snapshot(run.ledger.to_snapshot())
    assert [copy.state.tasks.records[t].suspect for t in suspects] == [True, True]
    assert ids(run.lease("r0", 8)) == suspects[:1]


def test_a_suspect_waits_for_no_worker_that_leaves_or_has_no_weights(run: Driven) -> None:
    first, _ = make_suspects(run, 2)
    run.do(cmd.drain("d", "r0", replace=True))
    assert ids(run.lease("r1", 8)) == [first]
    run.die("r1")
    run.register("r1")
    run.observe("r1")
    run.rollout("r2")
    assert ids(run.lease("r2", 8)) == [first]


def test_poisoned_tasks_cost_a_run_themselves_alone() -> None:
    """Whole simulated runs in which nothing dies but of poisoned tasks."""
    deaths = quarantined = 0
    for seed in range(15):
        rng = random.Random(seed)
        shape = Shape(
            spec=run_spec(steps=6, groups_per_step=4, max_staleness=2, dataset_rows=50),
            controllers=1,
            policy=1,
            rollout=rng.choice([1, 2, 3]),
            slots=8,
            generate_s=lambda r: r.expovariate(1.0),
            fates={rng.randrange(12): "kills" for _ in range(rng.choice([1, 2]))},
        )
        world = World(seed, shape)
        world.run(quiet_after=1.0, limit=2000.0)
        guilty = {f"t{n}" for n in shape.fates}
        dropped = world.oracle.ledger.state.tasks.dropped["quarantined"]
        assert dropped <= len(guilty), seed
        assert {t for t, n in world.oracle.isolated_deaths.items() if n} <= guilty, seed
        deaths += world.oracle.counts["deaths"]
        quarantined += dropped
    assert deaths > 15 and quarantined > 0
