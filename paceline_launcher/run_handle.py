"""Runs in Python: ``paceline.start`` and ``paceline.attach`` give a handle that watches, steers and
stops a run, and reads what it has written."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tomli_w

from paceline.config.load import load_config
from paceline.errors import BadInput, UserError
from paceline.observe.fleet_file import FleetRecord
from paceline.observe.projection import Projection
from paceline.observe.run_files import read_lines
from paceline.observe.run_watcher import follow_events, leader_status
from paceline.observe.runs import is_run, is_running, read_run, read_summary
from paceline.rpc.grpc_channel import as_dict
from paceline.user_code import python_module
from paceline_launcher.cli.common import Target
from paceline_launcher.cli.samples import Sort, find_groups
from paceline_launcher.cli.status import explain, status_of

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane

T = TypeVar("T")

POLL_S = 0.2
LAST_LINES = 20
"""Lines of a launcher's output that an error repeats."""


class RunFailed(UserError):
    """A run could not be started, or has failed. The message has the reason."""


class Rows(list[dict[str, Any]]):
    """Rows as a run has written them, one dictionary each."""

    def frame(self) -> Any:
        """The rows as a pandas DataFrame, one column for each field."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(self)


def start(
    config: str | Path | Mapping[str, Any],
    *,
    run_dir: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    fresh: bool = False,
) -> RunHandle:
    """Starts the fleet of a run on this machine, as `paceline up` does, and returns once its
    controllers answer. It goes on if this process ends.

    ``config``: a TOML file, or its content as a dictionary. ``settings``: overrides, such as
    ``{"train.steps": 50}``. ``fresh``: delete the earlier run in ``run_dir`` first; else the run
    that it has is continued. Raises RunFailed with what the launcher said if it does not start.
    """
    with contextlib.ExitStack() as files:
        path = config
        if isinstance(config, Mapping):
            written = files.enter_context(tempfile.NamedTemporaryFile("w", suffix=".toml"))
            written.write(tomli_w.dumps(config))
            written.flush()
            path = written.name
        directory = Path(run_dir or Path("runs") / load_config(str(path)).run.name)
        command = [*python_module("paceline_launcher"), "up", str(path)]
        command += ["--run-dir", str(directory), *(["--fresh"] if fresh else [])]
        for name, value in (settings or {}).items():
            command += ["--set", f"{name}={json.dumps(value)}"]
        output, name = tempfile.mkstemp(prefix="paceline-up-", suffix=".log")
        # A group of its own: an interrupted notebook cell does not stop the run.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        os.close(output)
        run = RunHandle(directory, process=process, output=Path(name))
        run._await_start()
        return run


def attach(run_dir: str | Path) -> RunHandle:
    """A handle on the run in ``run_dir``, which runs or is over. Raises BadInput if the directory
    has none."""
    if not is_run(Path(run_dir)):
        raise BadInput(f"{run_dir} is no run directory: it has no events.jsonl and no config.toml")
    return RunHandle(Path(run_dir))


class RunHandle:
    """A run in a directory. Methods that read need its directory alone. Those that steer raise
    UserError if the leader refuses, and Unreachable with one line if the run is over."""

    def __init__(
        self,
        path: Path,
        *,
        process: subprocess.Popen[bytes] | None = None,
        output: Path | None = None,
    ) -> None:
        self.path = path
        self.output = output
        """File with what the launcher says, if this handle has started it."""
        self._process = process
        self._target = Target(run_dir=path)

    def __repr__(self) -> str:
        return f"<Run {self.path}: {self.state}>"

    @property
    def state(self) -> str:
        """running, finished, failed, interrupted, or ended (without a summary)."""
        return read_run(self.path).state

    def status(self) -> dict[str, Any]:
        """Every process, the leader, its step and queue, as `paceline status --json` has them. Of a
        run that is over, its last step, from its files."""
        return as_dict(_outside_a_loop(lambda: status_of(self._target)))

    def summary(self) -> dict[str, Any] | None:
        """summary.json of a run that is over; None before that."""
        return read_summary(self.path)

    def metrics(self) -> Rows:
        """Metrics of each committed step, oldest first; docs/metrics.md says what they are."""
        return Rows(Projection.read(self.path).metrics.rows(-1, 1 << 40))

    def evaluations(self) -> Rows:
        """Step, version and scores of each held-out evaluation, oldest first."""
        return Rows(Projection.read(self.path).evals)

    def events(self) -> Rows:
        """Faults, joins, commits and changes, oldest first."""
        return Rows(read_lines(self.path / "events.jsonl"))

    def samples(
        self,
        limit: int = 100,
        *,
        step: int | None = None,
        row: int | None = None,
        text: str | None = None,
        sort: str = "recent",
    ) -> Rows:
        """Groups of samples with prompt, completions and rewards. ``step``, ``row`` of the data set
        and ``text`` within prompt or completion narrow them; ``sort``: recent, oldest, best, worst,
        longest or stalest."""
        if sort not in list(Sort):
            raise BadInput(f"sort={sort!r}: give one of {', '.join(Sort)}")
        found = _outside_a_loop(
            lambda: find_groups(self._target, limit, step, row, text, Sort(sort))
        )
        return Rows(found["groups"])

    def follow(self) -> Iterator[dict[str, Any]]:
        """Yields events from the first one on, as they happen, until the run is over."""
        if self._target.over:
            yield from read_lines(self.path / "events.jsonl")
            return

        async def pump(control: ControlPlane) -> None:
            async for event in follow_events(control):
                found.put(event)
                if closed.is_set():
                    return

        def serve() -> None:
            try:
                self._target.ask(pump)
                found.put(None)
            except Exception as error:
                found.put(error)

        found: queue.SimpleQueue[dict[str, Any] | Exception | None] = queue.SimpleQueue()
        closed = threading.Event()
        threading.Thread(target=serve, name="paceline-follow", daemon=True).start()
        try:
            while (event := found.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            closed.set()

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Waits until the run is over and returns its summary. Raises RunFailed if it failed, and
        TimeoutError after ``timeout_s`` seconds."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._process.poll() is None if self._process else is_running(self.path):
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the run in {self.path} is not over after {timeout_s:g} s")
            time.sleep(POLL_S)
        summary = self.summary()
        if summary is None or summary.get("status") == "failed":
            reason = summary.get("reason") if summary else self._last_words()
            raise RunFailed(f"the run in {self.path} failed: {reason}")
        return summary

    def scale(self, desired: Mapping[str, int] | None = None, **counts: int) -> str:
        """Changes the desired numbers of workers, as ``policy=2, rollout=4``, or
        ``{"scorer:NAME": 2}``. Returns who starts or drains them."""
        return self._send("Scale", desired={**(desired or {}), **counts})

    def drain(self, worker: str, *, replace: bool = False) -> str:
        """Lets one worker finish its tasks and leave. ``replace``: another takes its place."""
        return self._send("Drain", worker_id=worker, replace=replace)

    def pause(self) -> str:
        """Starts no new step and leases no new task until resume()."""
        return self._send("Pause", paused=True)

    def resume(self) -> str:
        return self._send("Pause", paused=False)

    def checkpoint(self) -> str:
        """Asks for a checkpoint beside the regular ones, after the next step."""
        return self._send("SaveCheckpoint")

    def set(self, settings: Mapping[str, Any]) -> str:
        """Changes settings while the run goes on, such as ``{"train.optimizer.lr": 5e-7}``."""
        values = {name: json.dumps(value) for name, value in settings.items()}
        return self._send("Settings", "ChangeSettings", settings=values)

    def stop(self, reason: str = "stopped from Python") -> str:
        """Ends the run for good, after the open step and with a final checkpoint."""
        return self._send("Stop", reason=reason)

    def why(self) -> str:
        """The cause for which the run waits or that limits it, and the remedy; of a run that is
        over, how it ended. Raises Unreachable if no controller answers."""
        return _outside_a_loop(lambda: explain(self._target)[0])

    def _ask(self, work: Callable[[ControlPlane], Awaitable[T]]) -> T:
        return _outside_a_loop(lambda: self._target.ask(work))

    def _send(self, name: str, method: str = "", **fields: Any) -> str:
        return str(_outside_a_loop(lambda: self._target.request(name, fields, method)).message)

    def _await_start(self) -> None:
        assert self._process is not None
        while self._process.poll() is None:
            # A run that another launcher has in the directory answers too: this one is refused.
            record = FleetRecord.read(self.path)
            if record is not None and record.supervisor.pid == self._process.pid:
                with contextlib.suppress(UserError):
                    self._ask(lambda control: leader_status(control, 1.0))
                    return
            time.sleep(POLL_S)
        if self._process.returncode:
            raise RunFailed(f"the run in {self.path} did not start: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self.output.read_text().splitlines() if self.output is not None else []
        return "\n".join(lines[-LAST_LINES:]) or "its processes have gone without a summary"


def _outside_a_loop(work: Callable[[], T]) -> T:
    """``work()`` in a thread: this one may run an event loop, as a notebook's does."""
    with ThreadPoolExecutor(1, "paceline-ask") as thread:
        return thread.submit(work).result()
