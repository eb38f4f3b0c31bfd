"""1,000 crash-and-resume points of every role on the real controller: no row is skipped or trained
twice."""

from collections import Counter

import pytest

from controller.ledger.decisions import leases
from controller.ledger.state.state import State
from controller.ledger.state.tasks import Task
from testbed.simulator.crash_points import ROLES, run_crash_points, run_turn_point
from testbed.simulator.oracles.ledger import Violation
from testbed.simulator.turn_faults import DOOMS, LOANS, WHOM, Doom

CHUNKS = 4
RUNS = 200
"""Each has one point of each role: 200 points of each of 5 roles."""
SOURCES_RUNS = 50


def points(
    chunk: int, whole: int, request: pytest.FixtureRequest, sources: bool = False
) -> tuple[int, Counter[str]]:
    """(runs of this chunk, what happened in them), if there are ``whole``; a share of them in a
    quick run, which has fewer schedules too."""
    runs = whole * min(1000, request.config.getoption("--schedules")) // 1000
    seeds = range(chunk, runs, CHUNKS)
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += run_crash_points(seed, sources=sources).oracle.counts
        except Exception as error:
            again = f"python -m testbed.simulator --crash-points --seed {seed} --verbose"
            pytest.fail(f"{type(error).__name__}: {error}\n{sources=}; again: {again}")
    assert counts["lost tails"] == len(seeds)
    return len(seeds), counts


@pytest.mark.timeout(0)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_row_is_skipped_or_trained_twice_at_any_crash_and_resume_point(
    chunk: int, request: pytest.FixtureRequest
) -> None:
    runs, counts = points(chunk, RUNS, request)
    assert {r: counts[f"points: {r}"] for r in ROLES} == dict.fromkeys(ROLES, runs)
    if runs < RUNS // CHUNKS:
        return  # too few for what not every run has
    assert counts["rollbacks"] > 0
    # As by default: late groups are trained, without their oldest tokens; and held-out rows are
    # scored.
    assert counts["masked"] > 0 and counts["evaluated"] > 0
    # Beside the points: settings change in every run, and some finished runs go on.
    assert counts["settings changed"] > RUNS // CHUNKS // 2 and counts["extended"] > 0


@pytest.mark.timeout(0)
@pytest.mark.parametrize("lends", [False, True])
@pytest.mark.parametrize("whom", WHOM)
def test_no_row_is_skipped_or_trained_twice_at_any_moment_of_a_turn_or_of_a_loan(
    whom: str, lends: bool
) -> None:
    """Of a replica, a rollout worker and a scorer: before, in and after a park and an unpark; and
    as it is journalled that a seat is lent, returned or granted."""
    dooms = [doom for doom in [*DOOMS, *LOANS * lends] if doom.whom == whom]
    for doom in dooms:
        if lends and doom.role == "scorer":
            continue  # these take turns only
        runs = (run_turn_point(doom, seed, lends=lends).oracle.counts for seed in range(3))
        assert any(counts[f"struck in a turn: {whom}"] for counts in runs), str(doom)


@pytest.mark.parametrize(
    ("doom", "seed", "lends"),
    [
        # A new leader granted a seat before it had heard who used it under a grant that was lost.
        (Doom("tail", "rollout", "unpark", "before"), 3, False),
        (Doom("tail", "policy", "unpark", "before"), 5, True),
        (Doom("tail", "policy", "park", "before"), 3, False),
        # A snapshot of entries that were lost meanwhile was stored: no leader could go on from it.
        (Doom("tail", "policy", "return", "in"), 1, True),
    ],
)
def test_turns_that_once_failed(doom: Doom, seed: int, lends: bool) -> None:
    run_turn_point(doom, seed, lends=lends)


@pytest.mark.parametrize("seed", [237, 269])
def test_points_that_once_failed(seed: int) -> None:
    """A finished run was extended, and a task with which two owners had died was leased in
    company."""
    run_crash_points(seed)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_row_of_every_source_is_accounted_for(
    chunk: int, request: pytest.FixtureRequest
) -> None:
    """50 schedules of crashes and resumes. The oracle keeps books of its own: every row of every
    source is trained or dropped, once."""
    runs, counts = points(chunk, SOURCES_RUNS, request, sources=True)
    assert not runs or counts["rows"]


def test_the_points_notice_a_cursor_that_runs_ahead_of_training_on_resume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every new leader begins one task too late in the data order. The ledger's counts still agree:
    as many tasks are dispatched as are accounted for, only of other rows."""
    train_tasks = leases._train_tasks

    def ahead(state: State, count: int) -> list[Task]:
        waiting = len(state.tasks.pending)
        found = train_tasks(state, count)
        return found[:waiting] + [
            Task(leases.TaskId(f"t{task.ordinal + state.terms - 1}"), task.kind, task.ordinal)
            for task in found[waiting:]
        ]

    monkeypatch.setattr(leases, "_train_tasks", ahead)
    with pytest.raises(Violation, match="is leased after"):
        run_crash_points(0)
