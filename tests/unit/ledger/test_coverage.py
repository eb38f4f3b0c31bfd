"""Coverage report: every row of every data-set epoch is trained once, dropped, on its way or still
to come."""

import pytest

from controller.ledger.state.state import State
from controller.store.ledger_follower import coverage_of, totals_of
from paceline.dataset.data_order import task_row
from paceline.observe.coverage import add, contains, count
from tests.fixtures.ledgers import Driven


@pytest.fixture
def run() -> Driven:
    """Batches of 4 of a data set of 10 rows."""
    return Driven.fleet("p0", "r0", dataset_rows=10)


def test_spans_merge_in_any_order_and_notice_a_repeat() -> None:
    spans: list[int] = []
    for ordinal in (5, 3, 4, 9, 0, 1):
        assert add(spans, ordinal)
    assert spans == [0, 2, 3, 6, 9, 10]
    assert not add(spans, 4) and not add(spans, 0)
    assert count(spans) == 6
    assert [n for n in range(11) if contains(spans, n)] == [0, 1, 3, 4, 5, 9]


def test_every_row_is_trained_dropped_on_its_way_or_still_to_come(run: Driven) -> None:
    run.train()
    first, second = run.lease("r0", 2).leases
    run.return_task("r0", first, "drop", "prompt_too_long")
    run.submit("r0", second, 1)
    run.lease("r0")
    books, report = run.totals.coverage, run.coverage()
    assert (count(books.trained), books.count()) == (4, 5)
    assert (report.rows, report.skipped, report.twice) == (10, 0, 0)


def test_rows_that_a_checkpoint_covers_are_accounted_for_after_a_trimmed_journal(
    run: Driven,
) -> None:
    run.train()
    run.checkpoint(digest="")
    before = run.coverage()
    assert count(run.totals.coverage.trained) == 4 and not run.state.tasks.records
    assert coverage_of(totals_of(run.snapshot()), run.state) == before


def test_a_cursor_that_ran_ahead_is_reported_with_the_rows_it_skipped(run: Driven) -> None:
    run.train()
    state: State = run.state
    state.tasks.cursor += 2
    report = run.coverage()
    assert report.skipped == 2
    rows = [task_row(1, ordinal, 10, True) for ordinal in (4, 5)]
    assert report.skipped_rows == rows
    (line,) = report.problems()
    assert line.startswith(f"2 rows skipped: row {rows[0][1]} of epoch 0")


def test_a_row_that_is_finished_twice_is_reported(run: Driven) -> None:
    run.train()
    run.checkpoint(digest="")
    again = {"type": "TaskDropped", "task_id": "t2", "attempt": 1, "reason": "stale"}
    run.totals.take(run.now, again)
    report = run.coverage()
    assert report.twice == 1 and report.repeated_rows == [task_row(1, 2, 10, True)]
