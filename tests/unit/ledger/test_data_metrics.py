"""Metrics of the data: per source, truncated prompts, and what the proof says of each source."""

from paceline.dataset.data_order import DataSource
from paceline.observe.coverage import count
from tests.fixtures.ledgers import Driven

SOURCES = (DataSource("code", 3, 250), DataSource("math", 9, 750))


def started() -> Driven:
    return Driven.fleet("p0", "r0", dataset_rows=12, steps=40, sources=SOURCES)


def test_a_step_says_the_reward_and_the_share_of_each_source() -> None:
    run = started()
    leases = run.lease("r0", 4).leases
    of_code = [lease for lease in leases if lease.index < 3]
    for lease in leases:
        run.submit("r0", lease, reward_mean=1.0 if lease in of_code else 0.25, prompt_cut=7)
    run.vote("p0")
    metrics = run.state.steps.metrics
    assert metrics["source_share_code"] == len(of_code) / 4
    assert metrics["source_share_math"] == 1 - len(of_code) / 4
    assert metrics["source_reward_math"] == 0.25
    assert ("source_reward_code" in metrics) == bool(of_code)
    assert metrics["prompts_truncated"] == 4 and metrics["prompts_too_long"] == 0


def test_the_rows_of_all_sources_are_in_the_proof() -> None:
    run = started()
    dropped = 0
    for _ in range(20):
        (lease,) = run.lease("r0").leases
        run.return_task("r0", lease, "drop", "prompt_too_long")
        dropped += 1
        run.train()
        run.observe("r0", loaded=run.state.versions.version)
    report = run.coverage()
    books = run.totals.coverage
    assert list(report.problems()) == [] and report.rows == 12
    assert (count(books.dropped["prompt_too_long"]), count(books.trained)) == (dropped, 80)
