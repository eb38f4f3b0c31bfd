"""State of a run as rich tables, for the live view and ``paceline status``."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.observe.summary import TIME_SPLIT
from paceline.redis.client import remedy_of
from paceline.v1 import admin_pb2, common_pb2
from paceline_launcher.console.terminal import printable, short, table

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
TASKS = ("pending", "leased", "ready", "in step", "trained")


def fleet_table(
    status: admin_pb2.StatusReply, *, gone: bool = True, most: int | None = None
) -> Table:
    """A row for each process, at most ``most``; ``gone``: dead and stopped workers too. Workers
    that just run are left out first."""
    workers = [w for w in status.workers if gone or w.state not in GONE]
    room = len(workers) if most is None else max(0, most - len(status.controllers))
    shown, left_out = workers, 0
    if len(workers) > room:
        room = max(0, room - 1)  # the last line says how many more there are
        left_out = len(workers) - room
        shown = sorted(workers, key=lambda w: (w.state in QUIET, w.worker_id))[:room]
    rows: list[Sequence[Any]] = [
        (c.controller_id, _cut(c.host), c.pid, _state(c.state), "", "", _age(c.heartbeat_age_s), "")
        for c in sorted(status.controllers, key=lambda c: c.controller_id)
    ]
    for worker in sorted(shown, key=lambda w: w.worker_id):
        in_mesh = worker.role == common_pb2.ROLE_POLICY and worker.mesh_epoch
        leases = f" ({worker.held_leases} tasks)" if worker.held_leases else ""
        rows.append(
            (
                worker.worker_id,
                _cut(worker.host),
                worker.pid,
                _state(worker.state),
                worker.mesh_epoch if in_mesh else "",
                worker.version if worker.version >= 0 else None,
                _age(worker.heartbeat_age_s),
                _cut(f"{worker.activity}{leases}".strip()),
            )
        )
    if left_out:
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
    counts = {name: getattr(tasks, name.replace(" ", "_")) for name in TASKS}
    counts["dropped"] = sum(tasks.dropped.values())
    rows.append(("tasks", "   ".join(f"{count} {name}" for name, count in counts.items())))
    for change in status.changed:
        line = f"{change.name} {change.old} -> {change.new} (from step {change.step})"
        rows.append(("changed", line))
    if status.proposed:
        desired = " ".join(f"{role}={count}" for role, count in sorted(status.proposed.items()))
        rows.append(("proposal", f"{desired}: {status.proposed_why}"))
    if status.reward_trouble:
        rows.append(("warning", Text(printable(status.reward_trouble), style="yellow")))
    if status.provider_trouble:
        rows.append(("provider", status.provider_trouble))
    return table("|", rows, header=False)


def headline(status: admin_pb2.StatusReply) -> str:
    line = (
        f"{status.run_name or status.run_id}: {status.phase}, step "
        f"{status.step}/{status.total_steps}, leader {status.leader or '-'} (term {status.term}), "
        f"version {status.version}, mesh epoch {status.mesh_epoch}"
    )
    reason = status.reason or remedy_of(status.phase)
    return printable(f"{line}: {reason}" if reason else line)


def _cut(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLE.get(state, ""))


def _age(seconds: float) -> str:
    if seconds < 0:
        return "-"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
