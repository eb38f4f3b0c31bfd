"""What ``paceline why`` says in every state of a run: a table of sentences."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from controller.diagnosis.collect import unlearned
from controller.diagnosis.diagnose import diagnose
from controller.diagnosis.evidence import Evidence, LeaseEvidence, Process
from controller.ledger import decisions as cmd
from controller.ledger.enums import Phase, Role, SuspendStage
from paceline.observe.vocabulary import DeathCause, FaultCause, Severity
from paceline.process.waits import WaitKind
from tests.fixtures.diagnoses import evidence, fleet, wait, worker
from tests.fixtures.ledgers import Driven

PACE = "Trainers and rollout workers keep pace."
INFO, WARNING, ERROR = Severity.INFO, Severity.WARNING, Severity.ERROR
NIGHT_S = 36_000.0
PAUSE, STOP = cmd.pause("p", True), cmd.stop("s", "enough")
SUSPEND = cmd.suspend("u", SuspendStage.FINISH_STEP, "")


def starting(*waits: tuple[WaitKind, float], **changes: Any) -> Evidence:
    found = tuple(wait(kind, "loading the model /m", "/m", age_s) for kind, age_s in waits)
    alone = (Process("p0", Role.POLICY, "b", 800, found),) if waits else ()
    return evidence(Driven(), sessionless=alone, **changes)


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
    idle = (wait(WaitKind.GROUPS, "waiting for the groups of step 1", "", NIGHT_S),)
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


AT_WORK = "step 1 is at work and waits for nobody; trainers and rollout workers keep pace"
AWAY: dict[str, Any] = {"trouble": "waiting for Redis (TimeoutError)", "trouble_s": 4.0}
COMPUTES = {"wedged_in_s": 299.0, "activity": "step 1: computing 2 groups"}
# State: its evidence, the severity, words of the sentence, and of the remedy (empty: there is
# none).
STATES: dict[str, tuple[Callable[[], Evidence], Severity, str, str]] = {
    "nothing is up yet": (starting, INFO, "the run waits for a policy replica, none has", ""),
    "nothing is up after a minute": (
        *(lambda: starting(since_commit_s=60.0), ERROR),
        *("waits 60 s for a policy replica, none has registered", "paceline logs policy-0"),
    ),
    "a large model is loaded": (
        *(lambda: starting((WaitKind.MODEL, 90.0)), INFO),
        *("the run waits 90 s for p0 (host b, pid 800), loading the model /m", ""),
    ),
    "a model is loaded for ever": (
        *(lambda: starting((WaitKind.MODEL, 900.0)), ERROR),
        *("the run waits 15 min for p0 (host b, pid 800), loading", "paceline stacks p0"),
    ),
    "the first step": (
        *(lambda: running(pace="", usual_step_s=0.0, since_commit_s=100.0), INFO),
        *("step 1 is at work and waits for nobody", ""),
    ),
    "healthy": (running, INFO, AT_WORK, ""),
    "healthy, a member computes": (lambda: running(worker("p0", **COMPUTES)), INFO, AT_WORK, ""),
    "slow": (
        *(lambda: running(step_open=False, since_commit_s=60.0), WARNING),
        *("step 1 takes 60 s, longer than usual", ""),
    ),
    "pausing": (
        *(lambda: at_rest(PAUSE, step_open=True, since_commit_s=1.0), INFO),
        *("the run is pausing; step 1 is finished first", ""),
    ),
    "paused, and workers died meanwhile": (
        *(lambda: replace(at_rest(PAUSE), workers=()), INFO),
        *("the run waits 10 h for its user, who has paused it", "paceline resume"),
    ),
    "stopping": (lambda: at_rest(STOP, step_open=True), INFO, "the run is stopping; step 1", ""),
    "stopping for now": (
        *(lambda: at_rest(SUSPEND, step_open=True), INFO),
        *("the run stops for now; step 1 is finished first", ""),
    ),
    "stopped for now": (
        *(lambda: at_rest(phase=Phase.SUSPENDED), INFO),
        *("the run has stopped for now; paceline up with its config continues it", ""),
    ),
    "waiting for Redis while it is paused": (
        *(lambda: at_rest(PAUSE, **AWAY), ERROR),
        *("the run waits 4 s for Redis, which does not answer (TimeoutError)", "paceline status"),
    ),
    "without a leader": (
        *(lambda: running(leads=False, controller_id="c1", lease=LeaseEvidence()), WARNING),
        *("the run waits for a leader: c1 stands by, and nobody holds the lease", ""),
    ),
    "two of four workers are dead": (
        *(lambda: without("p1", "r1"), WARNING),
        *("the run has lost p1 (host h, pid 1), killed, and r1; 1 of 2", "paceline logs p1"),
    ),
    "all replicas are dead": (
        *(lambda: without("p0", "p1"), WARNING),
        *("the run waits 1 s for p1 (host h, pid 1), which is dead", "paceline logs p1"),
    ),
    "nothing is learned": (
        *(lambda: running(unlearned="learns next to nothing"), WARNING),
        *("the run learns next to nothing", "paceline samples"),
    ),
    "finished": (
        *(lambda: over(Phase.FINISHED, ""), INFO),
        *("the run has finished after step 1", "paceline samples"),
    ),
    "failed": (
        *(lambda: over(Phase.FAILED, "no replica is left"), ERROR),
        *("the run has failed after step 1: no replica is left", "paceline events"),
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_a_run_in_this_state_is_described_so(state: str) -> None:
    make, severity, words, remedy = STATES[state]
    found = diagnose(make())
    assert words in found.sentence and found.severity == severity
    if remedy:
        assert f"{remedy} --run-dir runs/demo" in found.remedy
    else:
        assert not found.remedy
    for threat in ("declared dead", "fails in", "gives up"):
        assert found.severity is not INFO or threat not in found.sentence, "it is well"


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
