"""``paceline ledger verify``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.common import JsonOption, RunDirOption, print_json
from paceline.errors import BadInput

if TYPE_CHECKING:
    from controller.store.journal_audit import Report
    from paceline.config.schema import RedisConfig

ledger = typer.Typer(
    help="Verify a run's ledger.\n\nExample: paceline ledger verify --run-dir runs/demo",
    no_args_is_help=True,
)


@ledger.command()
def verify(
    run_dir: RunDirOption = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Redis that holds the ledger.")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay the journal, check every invariant, and count every sample.

    If the embedded Redis of the run directory is not running, it is started for the check. Exit status
    1 if an invariant is violated.

    Example: paceline ledger verify --run-dir runs/demo
    """
    from controller.store.journal_audit import verify as replay

    if (run_dir is None) == (redis_url is None):
        raise BadInput("give either --run-dir DIR or --redis-url URL")
    with redis_of(run_dir, redis_url) as url:
        name = run or (_settings(run_dir)[0] if run_dir else _only_run(url))
        report = replay(url, name)
    if as_json:
        counts, problems = report.counts, report.problems
        print_json({"run": name, "ok": report.ok, "counts": counts, "problems": problems})
    else:
        _print(name, report)
    raise typer.Exit(0 if report.ok else 1)


def _print(name: str, report: Report) -> None:
    typer.echo(f"run {name}")
    for what, count in report.counts.items():
        if isinstance(count, dict):
            total = sum(count.values())
            reasons = ", ".join(f"{reason} {n}" for reason, n in sorted(count.items()))
            typer.echo(f"  {what:<12} {total}" + (f"  ({reasons})" if reasons else ""))
        else:
            typer.echo(f"  {what:<12} {count}")
    for problem in report.problems:
        typer.echo(f"  violated: {problem}")
    typer.echo("every invariant holds" if report.ok else "the ledger is NOT sound")


@contextmanager
def redis_of(run_dir: Path | None, redis_url: str | None = None) -> Iterator[str]:
    """URL of the Redis with the journal; a server that had to be started is stopped afterwards."""
    from paceline.config.schema import RedisConfig
    from paceline.redis.server import ensure_redis, stop_redis

    if run_dir is None:
        yield ensure_redis(Path(), RedisConfig(url=redis_url)).url
        return
    _, settings = _settings(run_dir)
    if settings.url is None and not (run_dir / "redis").is_dir():
        raise BadInput(f"--run-dir: {run_dir} holds no Redis data; give --redis-url")
    endpoint = ensure_redis(run_dir, settings)
    try:
        yield endpoint.url
    finally:
        if endpoint.started:
            stop_redis(run_dir)


def _settings(run_dir: Path) -> tuple[str, RedisConfig]:
    """Name and Redis of the run, without a look at its other settings: of those, another release may have
    had some that this one does not know."""
    from paceline.config.schema import RedisConfig

    path = run_dir / "config.toml"
    try:
        found = tomllib.loads(path.read_text())
        return str(found["run"]["name"]), RedisConfig(**found.get("redis", {}))
    except FileNotFoundError:
        raise BadInput(f"--run-dir: {run_dir} has no config.toml: not a run directory") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"--run-dir: {path} cannot be read: {error}") from error


def _only_run(url: str) -> str:
    from paceline.redis.client import connect_sync

    with connect_sync(url) as client:
        found = {key.decode() for key in client.scan_iter(match="paceline:*:journal", count=1000)}
    names: list[str] = sorted(
        key.removeprefix("paceline:").removesuffix(":journal") for key in found
    )
    if len(names) != 1:
        raise BadInput(f"--run NAME: this Redis holds {', '.join(names) or 'no run'}")
    return names[0]
