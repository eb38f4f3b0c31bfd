"""Runner of stages: one after the other, each as ``paceline up`` in a process of its own, with a
line of progress.

    for each stage:  done? ── yes ─► next
                       │ no
                       ├─ an earlier start's `paceline up` still runs it ─► wait for that one
                       ├─ start the command; its output goes to STAGE.log
                       └─ not done at its end ─► StageFailed: the log, and how to go on

A run that was cut is continued by `paceline up` itself, from its journal or its newest checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from examples.rlhf.stages import REPOSITORY, PipelineProblem, Place, paceline

POLL_S = 0.5
TAIL_BYTES = 4096
LAST_LINES = 8


class StageFailed(Exception):
    """A stage that ended without its output."""

    def __init__(self, place: Place, why: str) -> None:
        lines = _lines(place.log)[-LAST_LINES:]
        shown = "".join(f"    {line}\n" for line in lines)
        logs = f"{place.log}" + (f" and {place.directory}/logs" if place.stage.is_run else "")
        super().__init__(
            f"stage {place.stage.name}: {why}. The last lines of its output:\n{shown}"
            f"Read {logs}. The same command goes on with this stage"
        )


class Interrupted(Exception):
    """Ctrl-C or SIGTERM, which the stage has obeyed."""


class Progress:
    """One line on standard error that is written over; a line for every tenth of a stage if it is
    no terminal."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._terminal = sys.stderr.isatty()
        self._began = time.monotonic()
        self._tenth = -1

    def show(self, text: str, share: float = 0.0) -> None:
        tenth = int(10 * share)
        if not self._terminal and tenth <= self._tenth:
            return
        self._tenth = tenth
        self._write(f"{self._title}: {text}, {time.monotonic() - self._began:.0f} s", "")

    def end(self, text: str) -> None:
        self._write(f"{self._title}: {text} in {time.monotonic() - self._began:.0f} s", "\n")

    def _write(self, line: str, end: str) -> None:
        sys.stderr.write(f"\r\x1b[K{line}{end}" if self._terminal else f"{line}\n")
        sys.stderr.flush()


def run_stage(place: Place, title: str) -> None:
    """Until the stage is done. Raises StageFailed, Interrupted, PipelineProblem."""
    progress = Progress(title)
    place.check_record()
    place.root.mkdir(parents=True, exist_ok=True)
    _write_json(place.record, place.begun_with())
    while _is_running(place):
        progress.show("an earlier start of it still runs; waiting for it")
        time.sleep(POLL_S)
    if not place.done and not place.finished_without_export:
        status = _run(place, place.command(), progress)
        if status:
            raise StageFailed(place, f"its command ended with status {status}")
    if place.finished_without_export:
        words = ["export", str(place.directory), "--out", str(place.output)]
        if status := _run(place, [*paceline(), *words], progress):
            raise StageFailed(place, f"its model could not be exported (status {status})")
    if not place.done:
        raise StageFailed(place, "its command ended without an error and without its output")
    progress.end(f"done: {place.output}")


def _run(place: Place, command: list[str], progress: Progress) -> int:
    """Exit status of ``command``, whose output is added to the log of the stage."""
    with place.log.open("ab") as log, _Stops() as stops:
        # A session of its own: Ctrl-C in a terminal reaches it once, from here.
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stops.go_to(process)
        while True:
            try:
                status = process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                text, share = state_of(place)
                progress.show(f"{text}, stopping" if stops.told else text, share)
    if stops.told:
        raise Interrupted
    return status


class _Stops:
    """Signals that ask this process to stop. They go to a process that writes a checkpoint and
    ends, also those that came before it was there."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self._passed = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Stops:
        stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._tell) for number in stops}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def go_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pass_on()

    def _tell(self, number: int, frame: object) -> None:
        self.told.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._process is not None and self._passed < len(self.told):
            number = self.told[self._passed]
            self._passed += 1
            self._process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def state_of(place: Place) -> tuple[str, float]:
    """How far the stage is, in words and as a share of the whole."""
    if not place.stage.is_run:
        line = next(reversed(_lines(place.log)), "")
        found, _, of = line.partition(" of ")
        number = of.split(" ")[0]
        known = found.isdecimal() and number.isdecimal() and int(number) > 0
        return (line, int(found) / int(number)) if known else ("starts", 0.0)
    steps = steps_of(place)
    row = newest_step(place.directory)
    if not row:
        return "starts", 0.0
    values = [
        f"{label} {row[name]:.3f}"
        for name, label in place.stage.shows.items()
        if isinstance(row.get(name), int | float)
    ]
    shown = f"step {row['step']} of {steps}" if steps else f"step {row['step']}"
    return ", ".join([shown, *values]), row["step"] / steps if steps else 0.0


def steps_of(place: Place) -> int:
    """Of the settings; 0 if they cannot be read."""
    import tomllib

    with contextlib.suppress(OSError, ValueError, KeyError):
        given = place.settings.get("train.steps")
        table = tomllib.loads(place.stage.config.read_text(encoding="utf-8"))
        return int(given if given is not None else table["train"]["steps"])
    return 0


def newest_step(run_dir: Path) -> Mapping[str, Any]:
    """The newest whole line of a step in metrics.jsonl; empty if there is none in its end."""
    for line in reversed(_lines(run_dir / "metrics.jsonl")):
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and row.get("kind") == "step":
                return row
    return {}


def _is_running(place: Place) -> bool:
    """Whether another `paceline up` holds the run directory: its own starter was killed, and it
    goes on."""
    path = place.directory / "supervisor.lock"
    if not path.is_file():
        return False
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


@contextlib.contextmanager
def alone_in(root: Path) -> Iterator[None]:
    """One command at a time in a directory. Raises PipelineProblem."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / "pipeline.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PipelineProblem(
                f"--dir: another command works in {root}. Wait for it, or give another directory"
            ) from None
        yield


def run_all(places: list[Place], say: Callable[[str], None]) -> None:
    """The stages that are not done. Raises what ``run_stage`` raises."""
    for number, place in enumerate(places, 1):
        title = f"[{number}/{len(places)}] {place.stage.name}"
        if place.done:
            place.check_record()
            say(f"{title}: is done already: {place.output}")
            continue
        run_stage(place, title)


def _lines(path: Path) -> list[str]:
    """Whole lines of the end of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            start = max(0, file.tell() - TAIL_BYTES)
            file.seek(start)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    return [line for line in (lines[1:] if start else lines) if line.strip()]


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
