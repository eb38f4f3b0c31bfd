"""A sample's life in spans, from what a real ledger journals."""

from typing import Any

import pytest

from controller.export.traces import SampleSpans, Span
from tests.fixtures.ledgers import Driven


class Told:
    """Spans of a driven ledger's journal; each command's events are a second after those before."""

    def __init__(self, run: Driven, share: float = 1.0) -> None:
        self.run = run
        self.lines = SampleSpans("run", share)
        self.at = 0
        self.t = 2000.0
        self.spans: list[Span] = []

    def catch_up(self) -> list[Span]:
        new = [
            span for event in self.run.journal[self.at :] for span in self.lines.take(self.t, event)
        ]
        self.at = len(self.run.journal)
        self.t += 1.0
        self.spans += new
        return new

    def of(self, task_id: str) -> dict[str, Span]:
        """By key; no key twice."""
        found = {s.key: s for s in self.spans if s.task_id == task_id}
        assert len(found) == sum(s.task_id == task_id for s in self.spans)
        return found


@pytest.fixture
def told() -> Told:
    run = Driven.fleet("p0", "r0", "r1")
    told = Told(run)
    told.catch_up()
    return told


def by_name(spans: dict[str, Span]) -> dict[str, Span]:
    return {span.name: span for span in spans.values()}


def assert_nested(spans: dict[str, Span]) -> None:
    for span in spans.values():
        assert span.start <= span.end
        if span.parent:
            parent = spans[span.parent]
            assert parent.start <= span.start and span.end <= parent.end, (span, parent)


def test_a_trained_sample_has_every_part_in_order(told: Told) -> None:
    run = told.run
    leases = run.lease("r0", 4).leases
    told.catch_up()
    for lease in leases:
        run.submit("r0", lease, generate_s=0.5, reward_s=0.25)
        told.catch_up()
    run.vote("p0")
    told.catch_up()
    spans = told.of("t0")
    assert_nested(spans)
    parts = by_name(spans)
    assert set(parts) == {"task", "lease", "generate", "reward", "step"}
    assert parts["task"].start == parts["lease"].start == 2001.0
    assert parts["lease"].end == parts["reward"].end == 2002.0
    assert (parts["generate"].start, parts["generate"].end) == (2001.25, 2001.75)
    assert parts["step"].start == 2005.0
    assert parts["step"].end == parts["task"].end == 2006.0
    assert parts["task"].about == {"outcome": "trained", "step": 1}
    assert parts["step"].about["replica"] == "p0"
    assert parts["generate"].about["worker"] == "r0"
    lines = told.lines
    assert not lines._began and not lines._leases, "nothing is remembered of a task that is over"


def test_a_lost_lease_says_why_and_the_next_try_is_another_span(told: Told) -> None:
    run = told.run
    run.lease("r0", 1)
    told.catch_up()
    run.die("r0")
    told.catch_up()
    (again,) = run.lease("r1", 1).leases
    told.catch_up()
    run.submit("r1", again)
    told.catch_up()
    spans = told.of("t0")
    assert spans["lease/1"].error == "owner_died" and spans["lease/2"].error == ""
    assert spans["lease/1"].about["worker"] == "r0"
    assert spans["generate/2"].parent == "lease/2"
    assert "task" not in spans


def test_a_dropped_sample_ends_with_its_reason(told: Told) -> None:
    run = told.run
    (lease,) = run.lease("r0", 1).leases
    told.catch_up()
    run.return_task("r0", lease, "drop", "prompt too long")
    told.catch_up()
    spans = told.of("t0")
    assert spans["task"].error == "prompt too long"
    assert spans["task"].about["outcome"] == "dropped"
    assert_nested(spans)


def test_a_step_that_is_lost_with_its_trainers_is_another_span_of_the_same_trace(
    told: Told,
) -> None:
    run = told.run
    run.fill("r0", 4)
    told.catch_up()
    run.die("p0")
    told.catch_up()
    run.policy("p0")
    told.catch_up()
    run.vote("p0")
    told.catch_up()
    steps = [s for s in told.of("t0").values() if s.name == "step"]
    assert [bool(s.error) for s in steps] == [True, False]
    assert by_name(told.of("t0"))["task"].error == ""
    # Trained, and lost again: the task's own span was told and is not told twice.
    run.die("p0")
    run.policy("p0")
    told.catch_up()
    run.vote("p0")
    told.catch_up()
    assert sum(s.name == "step" and not s.error for s in told.of("t0").values()) == 2


def test_a_new_leader_tells_the_rest_and_nothing_again(told: Told) -> None:
    run = told.run
    run.fill("r0", 4)
    told.catch_up()
    before = {s.key for s in told.spans if s.task_id == "t0"}
    run.failover()
    successor = Told(run)
    successor.t = told.t - 1.0
    successor.at = 0
    successor.catch_up()
    successor.spans.clear()
    run.vote("p0")
    successor.catch_up()
    after = {s.key for s in successor.spans if s.task_id == "t0"}
    assert not before & after
    assert {s.name for s in successor.spans if s.task_id == "t0"} == {"step", "task"}


def test_the_share_of_traced_tasks_is_the_same_ones_for_everyone() -> None:
    chosen = [SampleSpans("run", 0.25).traced(f"t{n}") for n in range(4000)]
    assert chosen == [SampleSpans("run", 0.25).traced(f"t{n}") for n in range(4000)]
    assert 0.2 < sum(chosen) / len(chosen) < 0.3
    assert all(SampleSpans("run", 1.0).traced(f"t{n}") for n in range(100))


def test_evaluations_and_what_is_not_chosen_leave_nothing_behind() -> None:
    lines = SampleSpans("run", 1e-9)
    lease: list[Any] = ["t0", 1, "train", 0, 0, 1]
    leased = {"type": "TasksLeased", "worker_id": "r0", "leases": [lease, ["e0.0", 1, "eval"]]}
    assert list(lines.take(1.0, leased)) == [] and lines._began == {}
