"""``paceline ledger verify``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import (
    JsonOption,
    RunDirOption,
    given_or_default,
    print_json,
    run_config,
)
from paceline_launcher.terminal import out_console, table

if TYPE_CHECKING:
    from controller.store.journal_audit import Report
    from paceline.observe.coverage import CoverageReport

EPOCHS_SHOWN = 10


def verify(
    *,
    run_dir: RunDirOption = None,
    redis_url: str | None = None,
    run: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Replay the journal, check every invariant, and account for every row of every data-set epoch.

    Each row of an epoch is trained once, dropped for a reason, passed over by the curriculum, on
    its way, or still to come. With several sources, each has epochs of its own.

    If the embedded Redis of the run directory is not running, it is started for the check. Exit
    status 1 if an invariant is violated, or if a row was skipped or trained twice.

    Example: paceline ledger verify --run-dir runs/demo

    Args:
        redis_url URL: Redis that holds the ledger.
        run NAME: Name of the run.
    """
    from controller.store.journal_audit import verify as replay

    if (redis_url is None) != (run is None) or (run_dir and redis_url):
        raise BadInput("give either --run-dir DIR, or --redis-url URL and --run NAME")
    if redis_url is not None and run is not None:
        name, report = run, replay(redis_url, run)
    else:
        run_dir = given_or_default(run_dir)
        with redis_of(run_dir) as url:
            name = run_config(run_dir).run.name
            report = replay(url, name)
    if as_json:
        counts, problems = report.counts, report.problems
        body = {"run": name, "ok": report.ok, "counts": counts, "problems": problems}
        print_json({**body, "coverage": report.coverage.as_json()})
    else:
        _print(name, report)
    raise typer.Exit(0 if report.ok else 1)


def _print(name: str, report: Report) -> None:
    typer.echo(f"run {name}")
    for what, count in report.counts.items():
        shown = _by_reason(count) if isinstance(count, dict) else count
        typer.echo(f"  {what:<12} {shown}")
    if report.coverage.epochs:
        _print_coverage(report.coverage)
    for problem in report.problems:
        typer.echo(f"  violated: {problem}")
    typer.echo("every invariant holds" if report.ok else "the ledger is NOT sound")


def _print_coverage(coverage: CoverageReport) -> None:

    order = f"shuffled by seed {coverage.seed}" if coverage.shuffle else "in the order of the file"
    typer.echo(f"coverage of the data: {coverage.rows} rows, {order}")
    if coverage.sources:
        typer.echo(f"  sources: {', '.join(coverage.sources)}; an epoch is a pass over one source")
    # The newest ones of each source, source by source.
    shown = [
        epoch
        for source in coverage.sources or [""]
        for epoch in [e for e in coverage.epochs if e.source == source][-EPOCHS_SHOWN:]
    ]
    if earlier := len(coverage.epochs) - len(shown):
        typer.echo(f"  ({earlier} earlier epochs: --json shows them)")
    rows: list[tuple[Any, ...]] = [
        (
            *(e.source, e.epoch, e.trained, _by_reason(e.dropped), _by_reason(e.in_flight)),
            *(e.to_come, e.skipped, e.twice, e.passed_over),
        )
        for e in shown
    ]
    titles = "source|>epoch|>trained|>dropped|>on their way|>to come|>skipped|>twice|>passed over"
    out_console().print(table(titles, rows))


def _by_reason(counts: Mapping[str, int]) -> str:
    reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(counts.items()))
    return f"{sum(counts.values())}" + (f" ({reasons})" if reasons else "")


@contextmanager
def redis_of(run_dir: Path) -> Iterator[str]:
    """URL of the Redis with the journal; a server that had to be started is stopped afterwards."""
    from paceline.redis.server import ensure_redis, stop_redis

    settings = run_config(run_dir).redis
    if settings.url is None and not (run_dir / "redis").is_dir():
        raise BadInput(f"--run-dir: {run_dir} holds no Redis data; give --redis-url and --run")
    endpoint = ensure_redis(run_dir, settings)
    try:
        yield endpoint.url
    finally:
        if endpoint.started:
            stop_redis(run_dir)
