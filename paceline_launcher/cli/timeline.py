"""``paceline timeline``: what each process of a run did when, as a file for Perfetto."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import BadInput, plural
from paceline.observe.event_history import position_key
from paceline.observe.run_files import read_lines
from paceline.redis.server import NoRedis
from paceline_launcher.cli.common import Target, given_or_default

Take = Callable[[float, Mapping[str, Any]], None]
LONGEST_LINE = 1 << 20  # Bytes of an event


def timeline(
    run: Path | None = None,
    *,
    out: Path = Path("trace.json"),
    last: Annotated[float, typer.Option(min=0.0)] = 0.0,
    since: str = "",
) -> None:
    """Write what each process did when, in Chrome's trace event format.

    Open the file in https://ui.perfetto.dev (it stays on your machine) or in chrome://tracing. It
    has a lane for each process and seat, groups as flows from their lease to the step that trained
    them, weights from their commit to each engine's swap, waits with those who are waited for, and
    faults as marks. Groups and waits are those of the events that the run's journal still holds;
    before them there are steps, processes and faults.

    Example: paceline timeline runs/demo --last 600 --out trace.json.gz

    Args:
        run RUN: Directory of the run. Default: as for other commands.
        out --out -o FILE: File to write; it is compressed if its name ends in .gz.
        last SECONDS: Only so much before the end, or before now.
        since TIME: Only from this time on, such as 2026-11-27T17:40.
    """
    from paceline.observe.runs import is_run
    from paceline.observe.timeline import Timeline
    from paceline.observe.trace_file import TraceWriter

    if str(out) == "-" or (out.exists() and not out.is_file()):
        raise BadInput(f"--out: {out} is no file: give the name of one, such as trace.json")
    if not out.parent.is_dir():
        raise BadInput(f"--out: {out}: there is no directory {out.parent}")
    if last and since:
        raise BadInput("give either --last SECONDS or --since TIME")
    run = given_or_default(run)
    if not is_run(run):
        raise BadInput(f"{run} is no directory of a run: `paceline runs DIR` lists those below DIR")
    begin = _unix(since) if since else _end_of(run) - last if last else 0.0
    with TraceWriter(out) as writer:
        folded = Timeline(writer.write)

        def take(t: float, record: Mapping[str, Any]) -> None:
            if not folded.t:
                writer.begin(max(begin, t), folded.roles)
            folded.take(t, record)

        known = _feed(run, take)
        if not folded.t:
            raise BadInput(f"{run} has no events yet: has the run started?")
        for item in folded.open():
            writer.write(item)
        if begin and not writer.counts:
            end = f"its last event was at {_local(folded.t)}"
            raise BadInput(f"{run} has nothing from {_local(begin)} on: {end}")
    counts = writer.counts
    told = [plural(counts[kind], noun) for kind, noun in (("X", "slice"), ("s", "flow"))]
    typer.echo(f"{out}: {', '.join(told)}, {plural(counts['i'], 'mark')}")
    if known is None or begin < known:
        at = f"begin at {_local(known)}" if known else "are not there: it cannot be read"
        typer.echo(f"groups and waits of the journal {at}; before, steps, processes and faults")


def _local(t: float) -> str:
    return f"{datetime.fromtimestamp(t):%F %T}"


def _unix(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise BadInput(f"--since: {text} is no time such as 2026-11-27T17:40") from None


def _end_of(run: Path) -> float:
    """Unix seconds at which the run ended, by the last line of its events, or now."""
    from paceline.observe.runs import is_running

    if not is_running(run):
        with (
            contextlib.suppress(OSError, ValueError, LookupError),
            (run / "events.jsonl").open("rb") as file,
        ):
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE))
            whole, _, _ = file.read().rpartition(b"\n")  # A last line without an end is torn
            return float(json.loads(whole.rpartition(b"\n")[2])["t"])
    return time.time()


def _feed(run: Path, take: Take) -> float | None:
    """Hands over the events of a run in their order; Unix seconds of the journal's first one, None
    if it cannot be read."""
    from paceline.observe.run_watcher import follow_events
    from paceline.observe.runs import is_running
    from paceline_launcher.cli.ledger import redis_of, settings_of

    if is_running(run):
        target = Target(run_dir=run)
        return target.ask(lambda c: _take_all(follow_events(c, follow=False), run, take))
    with contextlib.suppress(BadInput, NoRedis):
        name, redis = settings_of(run)
        with redis_of(run, redis) as url:
            return asyncio.run(_take_all(_kept(url, name), run, take))
    _take_past(run, take)
    return None


async def _take_all(
    events: AsyncIterator[Mapping[str, Any]], run: Path, take: Take
) -> float | None:
    """Takes a journal, and before it what the run's file has that is no longer there."""
    known = None
    async for event in events:
        if known is None:
            known = float(event["at"])
            _take_past(run, take, position_key(event["position"]))
        take(event["at"], event)
    if known is None:
        _take_past(run, take)
    return known


def _take_past(run: Path, take: Take, until: tuple[int, ...] | None = None) -> None:
    for line in read_lines(run / "events.jsonl"):
        if until is not None and position_key(line["position"]) >= until:
            return
        take(line["t"], line)


async def _kept(url: str, name: str) -> AsyncIterator[Mapping[str, Any]]:
    """The events that a journal still holds."""
    from controller.store.journal import START, Journal
    from controller.store.redis_keys import Keys
    from paceline.redis.client import connect

    position = START
    async with connect(url, timeout_s=30.0) as client:
        while entries := await Journal(client, Keys(name)).scan(position):
            for entry in entries:
                for record in entry.records:
                    yield {**record, "position": entry.at.entry, "at": entry.t}
            position = entries[-1].at.entry
