"""The diagnosis of constructed states, word for word in tests/golden/diagnoses.txt: the right
process or thing is named at every wait point, and a run that is well alarms nobody."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from controller.diagnosis.diagnose import diagnose
from controller.diagnosis.evidence import Diagnosis, Evidence
from controller.ledger import decisions as cmd
from controller.ledger.enums import Phase, SuspendStage
from controller.status import unlearned
from paceline.observe.vocabulary import DeathCause, FaultCause, Severity
from paceline.process.waits import Wait, WaitKind
from testbed.faults import failpoints
from tests.fixtures.diagnoses import STOPPED, evidence, fleet, silent, wait, worker
from tests.fixtures.golden import Golden
from tests.fixtures.ledgers import Driven

# ---- the process that is stopped, or hangs

IN_REDUCE = wait(WaitKind.COLLECTIVE, "inside the all-reduce of epoch 4")
VOTING = wait(WaitKind.VOTES, "waiting for the votes of step 1")
GROUPS = wait(WaitKind.GROUPS, "waiting for the groups of step 1")
SENDS_STATE = wait(WaitKind.STATE, "sending the state to p0")
GETS_STATE = wait(WaitKind.STATE, "receiving the state from p1", "p1")
SENDS_WEIGHTS = wait(WaitKind.WEIGHTS, "sending weights to r0", "r0")
GETS_WEIGHTS = wait(WaitKind.WEIGHTS, "waiting for weights from p0")

MATRIX: dict[str, tuple[bool, dict[str, Any], dict[str, Any]]] = {
    # Wait point: step open, of the stopped p1 (or r1), of its peer p0 (or r0).
    "idle": (False, {"waits": (GROUPS,)}, {"waits": (GROUPS,)}),
    "forward": (True, {"activity": "step 1: computing 2 groups"}, {"waits": (IN_REDUCE,)}),
    "reduce": (True, {"waits": (IN_REDUCE,)}, {"waits": (IN_REDUCE,)}),
    # The last report was sent before the wait was a second old.
    "vote": (True, {"activity": "step 1: voting"}, {"waits": (VOTING,)}),
    "commit": (True, {"activity": "step 1: voting"}, {"waits": (IN_REDUCE,)}),
    "state_transfer": (
        True,
        {"mesh_epoch": 4, "waits": (SENDS_STATE,)},
        {"mesh_epoch": 0, "waits": (GETS_STATE,)},
    ),
    "send": (False, {"waits": (SENDS_WEIGHTS,)}, {}),
    "generate": (False, {"waits": (wait(WaitKind.ENGINE, "generating"),)}, {}),
    "submit": (False, {"waits": (wait(WaitKind.VERDICT, "submitting groups"),)}, {}),
    "receive": (False, {"loaded_version": -1, "waits": (GETS_WEIGHTS,)}, {}),
}


def test_every_wait_point_of_the_kill_matrix_is_here() -> None:
    assert set(MATRIX) == set(failpoints.POLICY) | set(failpoints.ROLLOUT)


def stopped(instant: str, *, here: bool) -> Evidence:
    """The kernel's word is there if the process is on the controller's machine."""
    step_open, own, peers = MATRIX[instant]
    role = "r" if instant in failpoints.ROLLOUT else "p"
    culprit = silent(f"{role}1", kernel=STOPPED if here else None, **own)
    return evidence(fleet(step_open), culprit, worker(f"{role}0", **peers))


def at_work_on(reason: Wait, step_open: bool = False, **changes: Any) -> Evidence:
    """r0 has two tasks and waits for ``reason``."""
    return evidence(fleet(step_open), worker("r0", held=2, waits=(reason,), **changes))


LONG = wait(WaitKind.ENGINE, "generating", age_s=100.0)
APPEND = wait(WaitKind.STORE, "appending to the journal", "Redis", 4.0)
HUB = wait(WaitKind.HUB, "loading the model me/m from http://hub:1", "http://hub:1", 30.0)
SCORES = replace(wait(WaitKind.REWARD, "scoring with mine:judge", "mine:judge", 8.0, 10.0), count=2)
STUCK: dict[str, Any] = {"waits": (replace(IN_REDUCE, age_s=40.0),), "wedged_in_s": 260.0}
SLOW: dict[str, Any] = {"still_s": 40.0, "wedged_in_s": 260.0, "activity": "step 1: computing"}
RANK = wait(WaitKind.RANK, "rank 1, stopped", "913", 4.0)


def redis(trouble: str, **changes: Any) -> Evidence:
    """p1 is silent as well: it waits for a reply."""
    known: dict[str, Any] = {"trouble": trouble, "redis_pid": 77, "own_waits": (APPEND,)}
    return evidence(fleet(), silent("p1"), **known, **changes)


def payloads(name: str, what: Wait, step_open: bool) -> Evidence:
    submitting = wait(WaitKind.VERDICT, "submitting groups", age_s=21.0)
    store = "the payload store (redis://b:1/0)"
    return evidence(fleet(step_open), worker(name, waits=(submitting, what)), payloads=store)


FETCHING = wait(WaitKind.PAYLOADS, "fetching 2 groups of step 1", age_s=20.0)
STORING = wait(WaitKind.STORE, "storing payloads (it is full)", "the payload store", 20.0)


def broken_epoch() -> Evidence:
    run = fleet()
    run.do(cmd.break_mesh("p0", run.current["p0"], run.state.fleet.mesh.epoch, "reset by peer"))
    return evidence(run, silent("p1"), worker("p0"))


def last_checkpoint() -> Evidence:
    run = fleet()
    run.train()
    run.do(STOP)
    path = "/mnt/run/checkpoints/step-000001"
    writing = wait(WaitKind.CHECKPOINT, f"writing checkpoint {path}", path, 90.0)
    return evidence(run, worker("p0", waits=(writing,)))


def recorded() -> Evidence:
    """No engine loads any weights: a rollout worker without them is a healthy one."""
    run = Driven.fleet("p0", recorded=True)
    run.register("r0")
    return evidence(run, worker("r0", loaded_version=-1), since_commit_s=1.0)


def without_memory(*loaded: str) -> Evidence:
    """Two workers had no memory for version 0; ``loaded`` have loaded version 1."""
    run = fleet(step_open=False)
    trouble = "weights not staged: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    for failures, name in ((1, "r0"), (2, "r1")):
        state = cmd.Lifecycle.RUNNING, -1, 0, 0, ""
        run.do(cmd.observe(name, run.current[name], *state, failures, trouble))
    if loaded:
        run.train()
    for name in loaded:
        run.observe(name, loaded=1)
    return evidence(run)


def taking_turns(asked_s: float, *, by_step: bool = True, **holder: Any) -> Evidence:
    """p0 and r0 share a seat, and r0 has it; with ``by_step`` it was asked for it."""
    run = Driven(max_staleness=0, late_groups="drop", steps=2)
    for name in "p0", "r0":
        run.register(name, seat="b/0")
        run.observe(name)
    run.observe("p0", state=0)
    run.do(cmd.report_seat("p0", run.current["p0"], run.directive("p0").seat.grant, True, 1))
    run.observe("r0", loaded=0)
    if by_step:
        run.fill("r0", 4)
        run.do(cmd.settle_turn())
    seat = run.state.fleet.seats.by_name["b/0"]
    assert seat.holder[0] == "r0" and seat.asked == by_step
    return evidence(run, worker("r0", **holder), now_t=seat.since + asked_s)


def last_evaluation() -> Evidence:
    """All steps are committed, and the worker generates for the evaluation after the last."""
    run = Driven.fleet("p0", "r0", steps=1, eval_rows=4, eval_every=1)
    for lease in run.lease("r0", 4).leases:
        run.submit("r0", lease)
    run.train()
    generates = wait(WaitKind.ENGINE, "generating", age_s=9.0)
    idle = replace(GROUPS, age_s=9.0)
    return evidence(
        run,
        worker("p0", waits=(idle,)),
        worker("r0", waits=(generates,), still_s=0.1),
        since_commit_s=60.0,
        usual_step_s=0.5,
    )


# ---- the run

PACE = "Trainers and rollout workers keep pace."
NIGHT_S = 36_000.0
PAUSE, STOP = cmd.pause("p", True), cmd.stop("s", "enough")
SUSPEND = cmd.suspend("u", SuspendStage.FINISH_STEP, "")


def running(*workers: Any, step_open: bool = True, **changes: Any) -> Evidence:
    usual = {"pace": PACE, "since_commit_s": 1.0, "usual_step_s": 0.5}
    return evidence(fleet(step_open), *workers, **{**usual, **changes})


def at_rest(
    *commands: cmd.Command, step_open: bool = False, phase: Phase | None = None, **changes: Any
) -> Evidence:
    """Since a night. The workers wait for what does not come, and the pace is that of before."""
    run = fleet(step_open)
    for command in commands:
        run.do(command)
    run.state.phase = phase or run.state.phase
    usual = {"pace": PACE, "since_commit_s": NIGHT_S, "usual_step_s": 0.5}
    at = evidence(run, **{**usual, **changes})
    idle = (replace(GROUPS, age_s=NIGHT_S),)
    if step_open:
        return at
    return replace(at, workers=tuple(replace(w, waits=idle, still_s=NIGHT_S) for w in at.workers))


def without(*names: str) -> Evidence:
    """These died a moment ago; the others have formed an epoch of their own."""
    run = fleet(step_open=False)
    for name in names:
        how = DeathCause.EXIT, "", FaultCause.KILLED
        run.do(cmd.declare_dead(name, run.current[name], *how))
    if run.state.fleet.mesh.broken:
        run.do(cmd.form_mesh())
    return evidence(run, pace=PACE, since_commit_s=1.0)


def over(phase: Phase, reason: str) -> Evidence:
    run = fleet()
    run.train()
    run.state.phase, run.state.reason = phase, reason
    return evidence(run, since_commit_s=NIGHT_S, usual_step_s=0.5)


PARKS: dict[str, Any] = {"activity": "giving the device up", "wedged_in_s": 260.0}
AWAY: dict[str, Any] = {"trouble": "waiting for Redis (TimeoutError)", "trouble_s": 4.0}
COMPUTES = {"wedged_in_s": 299.0, "activity": "step 1: computing 2 groups"}
NO_LEADER: dict[str, Any] = {"leads": False, "controller_id": "c1"}

STATES: dict[str, Callable[[], Evidence]] = {
    "a member computes, and the other waits for it": lambda: evidence(
        fleet(), worker("p0", **SLOW), worker("p1", waits=STUCK["waits"])
    ),
    "all members wait in one collective": lambda: evidence(
        fleet(), worker("p0", **STUCK), worker("p1", **STUCK)
    ),
    "a rank is stopped, and rank 0 reports it": lambda: evidence(
        fleet(),
        worker("p0", waits=(IN_REDUCE,)),
        worker("p1", waits=(RANK, IN_REDUCE), still_s=4.0, wedged_in_s=296.0),
    ),
    "a reward never returns": lambda: at_work_on(SCORES),
    "an engine makes no token": lambda: at_work_on(LONG, still_s=20.0, wedged_in_s=280.0),
    "a generation is long": lambda: at_work_on(LONG, still_s=0.2),
    "Redis is full": lambda: redis("paused: Redis full"),
    "Redis has no disk": lambda: redis("paused: Redis cannot write to its disk"),
    "Redis is stopped": lambda: redis("waiting for Redis (TimeoutError)", redis_kernel=STOPPED),
    "Redis is away": lambda: redis("waiting for Redis (ConnectionError)"),
    "an append does not return": lambda: evidence(fleet(), own_waits=(replace(APPEND, age_s=1.5),)),
    "a trainer waits for the payload store in a step": lambda: payloads("p1", FETCHING, True),
    "a trainer waits for the payload store": lambda: payloads("p1", FETCHING, False),
    "a worker waits for the payload store in a step": lambda: payloads("r1", STORING, True),
    "a worker waits for the payload store": lambda: payloads("r1", STORING, False),
    "payloads are read as usual": lambda: evidence(
        fleet(), worker("p1", waits=(replace(FETCHING, age_s=2.0),))
    ),
    "payloads are stored as usual": lambda: evidence(
        fleet(), worker("r1", waits=(wait(WaitKind.STORE, "at it", age_s=2.0),))
    ),
    "a member of a broken epoch has not reported": broken_epoch,
    "a stopping run writes its checkpoint": last_checkpoint,
    "recorded data": recorded,
    "two workers have no memory for weights": without_memory,
    "one of two has memory again": lambda: without_memory("r0"),
    "both have memory again": lambda: without_memory("r0", "r1"),
    "nothing is up yet": lambda: evidence(Driven()),
    "nothing is up after a minute": lambda: evidence(Driven(), since_commit_s=60.0),
    "nothing is up after five minutes": lambda: evidence(Driven(), since_commit_s=300.0),
    "the first step": lambda: running(pace="", usual_step_s=0.0, since_commit_s=100.0),
    "healthy": running,
    "healthy, and a member computes": lambda: running(worker("p0", **COMPUTES)),
    "slow": lambda: running(step_open=False, since_commit_s=60.0),
    "pausing": lambda: at_rest(PAUSE, step_open=True, since_commit_s=1.0),
    "paused, and workers died meanwhile": lambda: replace(at_rest(PAUSE), workers=()),
    "stopping": lambda: at_rest(STOP, step_open=True),
    "stopping for now": lambda: at_rest(SUSPEND, step_open=True),
    "stopped for now": lambda: at_rest(phase=Phase.SUSPENDED),
    "paused while Redis is away": lambda: at_rest(PAUSE, **AWAY),
    "without a leader": lambda: running(**NO_LEADER),
    "asked of a standby": lambda: running(**NO_LEADER, leader="c0 (host b, pid 7)"),
    "two of four workers are dead": lambda: without("p1", "r1"),
    "all replicas are dead": lambda: without("p0", "p1"),
    "the last evaluation": last_evaluation,
    "a seat is asked for": lambda: taking_turns(2.0, **PARKS),
    "a worker does not park": lambda: taking_turns(40.0, **PARKS, still_s=40.0),
    "a worker loads its model in its first turn": lambda: taking_turns(
        90.0, by_step=False, waits=(wait(WaitKind.MODEL, "loading the model /m", "/m", 90.0),)
    ),
    "a worker loads its model for ever": lambda: taking_turns(
        900.0, by_step=False, waits=(wait(WaitKind.MODEL, "loading the model /m", "/m", 900.0),)
    ),
    "a hub does not answer": lambda: taking_turns(30.0, by_step=False, waits=(HUB,)),
    "nothing is learned": lambda: running(unlearned="learns next to nothing"),
    "finished": lambda: over(Phase.FINISHED, ""),
    "failed": lambda: over(Phase.FAILED, "no replica is left"),
}


def told(found: Diagnosis) -> str:
    remedy = f"\nremedy: {found.remedy}" if found.remedy else ""
    return f"{found.severity}, {found.culprit.kind}: {found.sentence}{remedy}"


def test_the_culprit_is_named_with_the_reason_what_follows_and_the_remedy() -> None:
    found = {
        f"{instant}, stopped on {host}": diagnose(stopped(instant, here=host == "this host"))
        for instant in MATRIX
        for host in ("this host", "another host")
    }
    assert {each.severity for each in found.values()} == {Severity.ERROR}
    found |= {state: diagnose(make()) for state, make in STATES.items()}
    for state, each in found.items():
        for threat in ("declared dead", "fails in", "gives up"):
            assert each.severity is not Severity.INFO or threat not in each.sentence, state
    Golden("diagnoses").check_all({state: told(each) for state, each in found.items()})


def config(algorithm: str, advantage: str = "group") -> Any:
    loss = SimpleNamespace(advantage=advantage)
    return SimpleNamespace(train=SimpleNamespace(algorithm=algorithm, loss=loss))


def rows(share: float | None, spread: float = 0.0, count: int = 5) -> list[dict[str, Any]]:
    row = {"zero_variance_share": share, "reward_std": spread, "reward_mean": 0.25}
    return [row] * count


def test_equal_rewards_within_the_groups_of_many_steps_teach_nothing() -> None:
    told = unlearned(config("grpo"), rows(1.0, 0.4))
    assert "zero_variance_share" in told and "100%" in told and "mean is 0.25" in told
    # Some groups differ; the first steps; recorded data has none; other objectives.
    for steps in (rows(0.8), rows(1.0, count=2), rows(None), []):
        assert not unlearned(config("grpo"), steps)
    assert not unlearned(config("distill"), rows(1.0))


@pytest.mark.parametrize(("algorithm", "advantage"), [("ppo", "group"), ("reinforce++", "step")])
def test_rewards_that_differ_between_groups_teach_objectives_of_the_whole_step(
    algorithm: str, advantage: str
) -> None:
    assert not unlearned(config(algorithm, advantage), rows(1.0, 0.4))
    assert unlearned(config(algorithm, advantage), rows(1.0, 0.0))
