"""State of a run as rich tables, for the live view and ``paceline status``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from paceline.observe.summary import TIME_SPLIT
from paceline.redis.trouble import remedy_of
from paceline.v1 import admin_pb2, common_pb2
from paceline_launcher.console.terminal import printable

STATE_STYLE = {
    "running": "green",
    "leader": "green",
    "standby": "cyan",
    "spare": "cyan",
    "silent": "red",
    "starting": "yellow",
    "draining": "yellow",
    "suspect": "yellow",
    "dead": "red",
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
    "freshness": (
        "staleness {staleness_mean} (max {staleness_max})   ratio {ratio_mean} (max {ratio_max})   "
        "engine gap {logprob_gap_mean} (max {logprob_gap_max})"
    ),
}
"""Metrics of the newest step, by the name of their line."""


def fleet_table(
    status: admin_pb2.StatusReply, *, gone: bool = True, most: int | None = None
) -> Table:
    """One row per process; ``gone``: include dead and stopped workers.

    ``most``: rows at most. Workers that just run are left out first, and are counted.
    """
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("process", "host", "pid", "state", "mesh", "version", "heard", "doing"):
        # One line per process: on a narrow terminal, host and activity are cut.
        table.add_column(
            column,
            justify="right" if column in ("pid", "mesh", "version") else "left",
            no_wrap=column not in ("host", "doing"),
        )
    workers = [w for w in status.workers if gone or w.state not in GONE]
    room = len(workers) if most is None else max(0, most - len(status.controllers))
    shown, left_out = workers, 0
    if len(workers) > room:
        room = max(0, room - 1)  # the last line says how many more there are
        left_out = len(workers) - room
        shown = sorted(workers, key=lambda w: (w.state in QUIET, w.worker_id))[:room]
    for one in sorted(status.controllers, key=lambda c: c.controller_id):
        age = _age(one.heartbeat_age_s)
        host = _cut(one.host)
        table.add_row(one.controller_id, host, str(one.pid), _state(one.state), "", "", age, "")
    for worker in sorted(shown, key=lambda w: w.worker_id):
        is_policy = worker.role == common_pb2.ROLE_POLICY
        doing = worker.activity
        if worker.held_leases:
            doing = f"{doing} ({worker.held_leases} tasks)".strip()
        table.add_row(
            worker.worker_id,
            _cut(worker.host),
            str(worker.pid),
            _state(worker.state),
            str(worker.mesh_epoch) if is_policy and worker.mesh_epoch else "",
            str(worker.version) if worker.version >= 0 else "-",
            _age(worker.heartbeat_age_s),
            _cut(doing),
        )
    if left_out:
        table.add_row(f"… {left_out:,} more")
    return table


def progress_table(status: admin_pb2.StatusReply) -> Table:
    """Metrics of the newest step, and the tasks by state."""
    shown = defaultdict(lambda: "-", {name: _show(v) for name, v in status.metrics.items()})
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, line in LINES.items():
        # Recorded data has no reward and no staleness.
        if not shown or any(f"{{{metric}}}" in line for metric in shown):
            table.add_row(name, line.format_map(defaultdict(lambda: "-", shown)))
    split = [f"{n} {shown[k]}" for n in TIME_SPLIT if (k := f"time_{n}_s") in shown]
    table.add_row("seconds", "   ".join(split) or "-")
    tasks = status.tasks
    table.add_row(
        "tasks",
        f"{tasks.pending} pending   {tasks.leased} leased   {tasks.ready} ready   "
        f"{tasks.in_step} in step   {tasks.trained} trained   {sum(tasks.dropped.values())} dropped",
    )
    for one in status.changed:
        line = f"{one.name} {one.old} -> {one.new} (from step {one.step})"
        table.add_row("changed", _text(line))
    if status.proposed:
        table.add_row("proposal", _text(f"{_counts(status.proposed)}: {status.proposed_why}"))
    if status.reward_trouble:
        table.add_row("warning", _text(status.reward_trouble), style="yellow")
    if status.provider_trouble:
        table.add_row("provider", _text(status.provider_trouble))
    return table


def headline(status: admin_pb2.StatusReply) -> str:
    """One line: phase, step, version, mesh epoch and leader."""
    line = (
        f"{status.run_name or status.run_id}: {status.phase}, step {status.step}/{status.total_steps}"
        f", leader {status.leader or '-'} (term {status.term})"
        f", version {status.version}, mesh epoch {status.mesh_epoch}"
    )
    reason = status.reason or remedy_of(status.phase)
    return printable(f"{line}: {reason}" if reason else line)


def _counts(counts: Mapping[str, int]) -> str:
    return " ".join(f"{role}={count}" for role, count in sorted(counts.items()))


def _show(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _text(text: str) -> Text:
    """Text from a process: a plain string in a table would be parsed as markup."""
    return Text(printable(text))


def _cut(text: str) -> Text:
    """The same on one line, cut to the width of its column."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLE.get(state, ""))


def _age(seconds: float) -> str:
    if seconds < 0:
        return "-"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
