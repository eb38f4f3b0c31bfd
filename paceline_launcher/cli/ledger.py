"""``paceline ledger verify``."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import typer

from paceline.config.sections.services import RedisConfig
from paceline.config.sections.training import RunConfig
from paceline.errors import BadInput, one_line
from paceline_launcher.cli.common import (
    JsonOption,
    RunDirOption,
    given_or_default,
    print_json,
)
from paceline_launcher.terminal import out_console, table


def verify(
    *,
    run_dir: RunDirOption = None,
    redis_url: str | None = None,
    run: str | None = None,
    as_json: JsonOption = False,
) -> None:
    """Replay the journal, check every invariant, and account for every row of the data set.

    Each row that an epoch has passed is trained once, dropped for a reason, or on its way.

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
        name, redis = settings_of(run_dir)
        with redis_of(run_dir, redis) as url:
            report = replay(url, name)
    if as_json:
        counts, problems = report.counts, report.problems
        body = {"run": name, "ok": report.ok, "counts": counts, "problems": problems}
        print_json({**body, "coverage": asdict(report.coverage)})
        raise typer.Exit(0 if report.ok else 1)
    typer.echo(f"run {name}")
    out_console().print(table("|", report.counts.items(), header=False))
    for problem in report.problems:
        typer.echo(f"  violated: {problem}")
    typer.echo("every invariant holds" if report.ok else "the ledger is NOT sound")
    raise typer.Exit(0 if report.ok else 1)


def settings_of(run_dir: Path) -> tuple[str, RedisConfig]:
    """Name and Redis of a run. Its other settings may be those of another release: then the
    journal's format says so. Raises BadInput."""
    path = run_dir / "config.toml"
    try:
        stored = tomllib.loads(path.read_text(encoding="utf-8"))
        name = stored.get("run", {}).get("name", RunConfig().name)
        return str(name), RedisConfig(**stored.get("redis", {}))
    except FileNotFoundError:
        raise BadInput(f"--run-dir: {run_dir} has no config.toml: not a run directory") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadInput(f"--run-dir: {path} is not a run's: {one_line(error)}") from error


@contextmanager
def redis_of(run_dir: Path, settings: RedisConfig) -> Iterator[str]:
    """URL of the Redis with the journal; a server that had to be started is stopped afterwards."""
    from paceline.redis.server import ensure_redis, stop_redis

    if settings.url is None and not (run_dir / "redis").is_dir():
        raise BadInput(f"--run-dir: {run_dir} holds no Redis data; give --redis-url and --run")
    endpoint = ensure_redis(run_dir, settings)
    try:
        yield endpoint.url
    finally:
        if endpoint.started:
            stop_redis(run_dir)
