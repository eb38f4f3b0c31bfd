"""Live view of a run: a table on a terminal, plain lines otherwise."""

import contextlib
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from paceline.errors import plural
from paceline.observe.curves import duration
from paceline.observe.runs import TIME_SPLIT
from paceline.redis.client import remedy_of
from paceline.v1 import admin_pb2, common_pb2
from paceline_launcher.terminal import printable, short, table

AROUND_TABLES = 6
"""Lines of the view that are no rows of its two tables."""
PLAIN_EVERY_S = 2.0  # shortest interval between two lines about steps, without a terminal
BESIDE_EVERY_S = 10.0  # between two lines about what is done beside the steps


class RunOutput(RichConsole):
    """Output of a run, which goes on without its reader: what nobody reads any more (``| head``, a
    terminal that was closed) is written to ``log`` from then on. What the output's encoding lacks
    is escaped."""

    def __init__(self, log: Path, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr)
        if isinstance(self.file, TextIOWrapper):
            self.file.reconfigure(errors="backslashreplace")
        self._log = log

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Called by rich. The text that could not be written is in the stream's buffer still."""
        descriptor = self.file.fileno()
        try:
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, descriptor)
        os.close(log)
        with contextlib.suppress(OSError):
            self.file.flush()


class Console:
    """A run as it goes on: a line for each event and, on a terminal, a table below the lines that
    redraws itself; without one, a line about the newest step every few seconds."""

    def __init__(self, out: RichConsole | None = None) -> None:
        self._out = out or RichConsole()
        # A dumb terminal cannot redraw: rich would show nothing before the end.
        self.private = self._out.is_terminal and not self._out.is_dumb_terminal
        """Only the person at the terminal sees it. A log may be written from plain lines: no token
        belongs there."""
        self._live = Live(console=self._out, auto_refresh=False, transient=False)
        if self.private:
            self._live.start()
        self._began = time.monotonic()
        self._step = 0
        self._next_at = self._beside_at = 0.0
        self._warned = ""

    def show(self, status: admin_pb2.StatusReply) -> None:
        if self.private:
            self._live.update(picture(status, self._out.size.height), refresh=True)
        else:
            self._tell(status)

    def note(self, line: str, t: float | None = None) -> None:
        """Takes an event at ``t`` (Unix seconds), or now."""
        when = f"{time.monotonic() - self._began:7.1f}s"
        if self.private or t is not None:
            when = time.strftime("%H:%M:%S", time.localtime(t))
        self._out.print(f"{when}  {printable(line)}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()

    def _tell(self, status: admin_pb2.StatusReply) -> None:
        now = time.monotonic()
        # Without its numbers, which change from step to step.
        about = re.split(r"[\d:(]", status.reward_trouble)[0]
        if about not in ("", self._warned):
            self.note(f"warning: {status.reward_trouble}")
        self._warned = about
        at_work = any(worker.state == "running" for worker in status.workers)
        at_an_end = at_work and status.step in (0, status.total_steps)
        if status.reason and at_an_end and now >= self._beside_at:
            self._beside_at = now + BESIDE_EVERY_S
            self.note(status.reason)
        last = status.step == status.total_steps
        if status.step <= self._step or (now < self._next_at and not last):
            return
        self._step, self._next_at = status.step, now + PLAIN_EVERY_S
        m = status.metrics
        learning = f"loss {m['loss']:.4f}"
        if "reward_mean" in m:
            staleness = f"staleness {m['staleness_mean']:.2f}"
            learning = f"reward {m['reward_mean']:.3f} {learning} {staleness}"
        self.note(
            f"step {status.step}/{status.total_steps} {learning} "
            f"{m['samples_per_s']:.0f} samples/s {m['tokens_per_s']:.0f} tokens/s"
            + (f", {duration(status.time_left_s)} left" if status.time_left_s else "")
        )


def picture(status: admin_pb2.StatusReply, height: int) -> Group:
    """The state of a run, lower than ``height``: the newest events are in sight above it."""
    numbers = progress_table(status)
    room = height - height // 6 - numbers.row_count - AROUND_TABLES
    return Group(
        Text(headline(status), style="bold", no_wrap=True),
        ProgressBar(total=max(1, status.total_steps), completed=status.step),
        Text(""),  # the bar does not end its line: the next one would be cut off
        numbers,
        Rule(style="dim"),
        fleet_table(status, gone=False, most=max(2, room)),
    )


STATE_STYLE = {
    **dict.fromkeys(("running", "leader"), "green"),
    **dict.fromkeys(("standby", "spare", "blocked"), "cyan"),
    **dict.fromkeys(("starting", "draining", "suspect"), "yellow"),
    **dict.fromkeys(("silent", "dead"), "red"),
}
GONE = frozenset({"dead", "stopped"})
QUIET = frozenset({"running", "spare"})
LINES = {
    "reward": "{reward_mean} ± {reward_std}",
    "policy": (
        "loss {loss}   kl {kl}   entropy {entropy}   clipped {clip_fraction}   grad {grad_norm}   "
        "lr {lr}"
    ),
    "pace": "{samples_per_s} samples/s   {tokens_per_s} tokens/s   {step_s} s/step",
    "use": (
        "trainers {trainer_busy}   engines {engine_busy}   devices {device_busy}   mfu {mfu}   "
        "{tokens_per_s_device} tokens/s a device   engines {engine_tokens_per_s_device}"
    ),
    "freshness": (
        "staleness {staleness_mean} (max {staleness_max})   ratio {ratio_mean} (max {ratio_max})   "
        "engine gap {logprob_gap_mean} (max {logprob_gap_max})"
    ),
}
"""Metrics of the newest step, by the name of their line."""
TASKS = ("pending", "leased", "ready", "in step", "trained")


def fleet_table(
    status: admin_pb2.StatusReply, *, gone: bool = True, most: int | None = None
) -> Table:
    """A row for each process, at most ``most``; ``gone``: dead and stopped workers too. Workers
    that just run come last."""
    controllers = sorted(status.controllers, key=lambda c: c.controller_id)
    workers = [w for w in status.workers if gone or w.state not in GONE]
    workers.sort(key=lambda w: (w.state in QUIET, w.worker_id))
    rows: list[Sequence[Any]] = [
        (
            *(c.controller_id, _cut(c.host), c.pid, Text(c.state, STATE_STYLE.get(c.state, ""))),
            *("", "", _age(c.heartbeat_age_s), ""),
        )
        for c in controllers
    ]
    for w in workers[: None if most is None else max(0, most - len(controllers))]:
        in_mesh = w.role == common_pb2.ROLE_POLICY and w.mesh_epoch
        leases = f" ({plural(w.held_leases, 'task')})" if w.held_leases else ""
        rows.append(
            (
                *(w.worker_id, _cut(w.host), w.pid, Text(w.state, STATE_STYLE.get(w.state, ""))),
                *(w.mesh_epoch if in_mesh else "", w.version if w.version >= 0 else None),
                *(_age(w.heartbeat_age_s), _cut(f"{w.activity}{leases}".strip())),
            )
        )
    if left_out := len(controllers) + len(workers) - len(rows):
        rows.append([f"… {left_out:,} more"])
    # One line a process: on a narrow terminal, host and activity are cut.
    return table("process|~host|>pid|state|>mesh|>version|heard|~doing", rows)


def progress_table(status: admin_pb2.StatusReply) -> Table:
    shown = defaultdict(lambda: "-", {name: short(v) for name, v in status.metrics.items()})
    # Recorded data has no reward and no staleness.
    rows: list[tuple[str, str | Text]] = [
        (name, line.format_map(defaultdict(lambda: "-", shown)))
        for name, line in LINES.items()
        if not shown or any(f"{{{metric}}}" in line for metric in shown)
    ]
    split = [f"{n} {shown[k]}" for n in TIME_SPLIT if (k := f"time_{n}_s") in shown]
    rows.append(("seconds", "   ".join(split) or "-"))
    tasks = status.tasks
    if tasks.dispatched:
        counts = {name: getattr(tasks, name.replace(" ", "_")) for name in TASKS}
        counts["dropped"] = sum(tasks.dropped.values())
        rows.append(("tasks", "   ".join(f"{count} {name}" for name, count in counts.items())))
    for c in status.changed:
        rows.append(("changed", f"{c.name} {c.old} -> {c.new} (from step {c.step})"))
    rows += [("devices", line) for line in seat_lines(status)]
    desired = " ".join(f"{role}={count}" for role, count in sorted(status.proposed.items()))
    if desired:
        rows.append(("proposal", f"{desired}: {status.proposed_why}"))
    if status.reward_trouble:
        rows.append(("warning", Text(printable(status.reward_trouble), style="yellow")))
    if status.provider_trouble:
        rows.append(("provider", status.provider_trouble))
    return table("|", rows, header=False)


def seat_lines(status: admin_pb2.StatusReply) -> list[str]:
    """Who holds the devices that workers use in turn, since when and why: a line each."""
    lines = []
    for seat in status.seats:
        held = f"{seat.holder} parks" if seat.asked else seat.holder or "nobody"
        since = f" for {duration(seat.since_s)}" if seat.since_s else ""
        why = f" ({seat.why})" if seat.why else ""
        side = {"policy": "trains, ", "rollout": "generates, "}.get(seat.role, "")
        members = ", ".join(seat.members)
        lines.append(printable(f"{seat.name}: {side}{held}{since}{why}, of {members}"))
    return lines


def headline(status: admin_pb2.StatusReply) -> str:
    line = f"{status.run_name or status.run_id}: {status.phase}, step "
    line += f"{status.step}/{status.total_steps}, version {status.version}"
    if status.term or status.leader:
        line += f", leader {status.leader or '-'} (term {status.term})"
        line += f", mesh epoch {status.mesh_epoch}"
    if status.time_left_s:
        line += f", {duration(status.time_left_s)} left"
    reason = status.reason or remedy_of(status.phase)
    return printable(f"{line}: {reason}" if reason else line)


def _cut(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _age(seconds: float) -> str:
    if seconds < 0:
        return "-"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
