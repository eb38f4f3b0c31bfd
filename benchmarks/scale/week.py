"""The controller over a simulated week: 1,000 workers, faults as a large fleet has them.

Two controllers, one of them leading, are those that ship; their clock is stretched (see
testbed/simulator/long_run.py), Redis and workers are models. Sampled every virtual hour: memory
that the leader's objects take, journal and snapshot as they are in Redis, CPU time of the leader,
and how long no step was committed after each fault that stops steps.

    python -m benchmarks.scale.week [--days 7] [--workers 1000]
    python -m benchmarks.scale.week --picture        draws the curves again
"""

import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from benchmarks import runs
from testbed.simulator.long_run import DAY, HOUR, STRETCH, LongRun, shape_of

PICTURE = runs.REPOSITORY / "docs" / "images" / "week.png"
POLICIES = 4
STEP_S = 2.0
"""Of the controllers' seconds."""
BAD_HOSTS = ("host-3",)
SETTLED_H = 12
"""The first hours fill what is bounded by a number, such as the last outcomes."""
MIB = 1 << 20


def size_of(roots: Iterable[Any]) -> int:
    """Bytes of all objects that are reached from ``roots``, without code and the simulation."""
    outside = (type, ModuleType, FrameType, logging.Logger)
    modules = {id(vars(module)) for module in list(sys.modules.values())}
    seen: set[int] = set()
    waiting, total = list(roots), 0
    while waiting:
        value = waiting.pop()
        if id(value) in seen or id(value) in modules or isinstance(value, outside):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if isinstance(value, FunctionType):
            waiting += [value.__closure__, value.__defaults__, value.__kwdefaults__]
        elif not type(value).__module__.startswith("testbed."):
            waiting += gc.get_referents(value)
    return total


class Samples:
    """One row an hour, by the names of ``CURVES`` and a few more."""

    def __init__(self, world: LongRun) -> None:
        self.rows: list[dict[str, Any]] = []
        self._world = world
        self._cpu_s: dict[Any, float] = {}
        self._appended = self._steps = self._recoveries = 0

    def take(self, hour: int) -> None:
        world, redis = self._world, self._world.redis
        process, leader = world.leader_process, world.leader
        cpu_s = sum(world.timeline.cpu_s.get(p, 0.0) for p in world.controllers.values())
        row: dict[str, Any] = {
            "hour": hour,
            "steps": world.steps - self._steps,
            "journal_mib": redis.journal_bytes / MIB,
            "appended_mib": (redis.appended - self._appended) / MIB,
            "snapshot_mib": redis.snapshot_bytes / MIB,
            "payloads": len(redis.payloads),
            "controllers_cpu_s": world.dead_cpu_s + cpu_s - self._cpu_s.get("all", 0.0),
        }
        self._cpu_s["all"] = world.dead_cpu_s + cpu_s
        if process is not None:
            now, before = world.timeline.cpu_s[process], self._cpu_s.get(process, 0.0)
            row["leader_cpu_s"] = now - before
            self._cpu_s[process] = now
        if leader is not None:
            state = leader.ledger.state
            living = [w for w in state.fleet.workers.values() if w.alive]
            row |= {"workers": len(living), "tasks": len(state.tasks.records)}
            row["blocked"] = len(world.blocked())
            gc.collect()
            row["leader_mib"] = size_of([leader, leader.context.projector]) / MIB
            row["ledger_mib"] = size_of([state]) / MIB
        found = world.recoveries[self._recoveries :]
        row["recoveries"] = [
            {"hour": round(at / HOUR, 3), "fault": what, "seconds": round(s, 2)}
            for at, what, s in found
        ]
        self._appended, self._steps = redis.appended, world.steps
        self._recoveries = len(world.recoveries)
        self.rows.append({n: round(v, 4) if isinstance(v, float) else v for n, v in row.items()})


def growth(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    """How much ``name`` grows: medians of the first and the last day after that."""
    settled = [row[name] for row in rows if row["hour"] > SETTLED_H and name in row]
    part = max(1, min(24, len(settled) // 3))
    first, last = statistics.median(settled[:part]), statistics.median(settled[-part:])
    return {"first": first, "last": last, "ratio": last / first if first else 0.0}


GROWTH = ("leader_mib", "ledger_mib", "journal_mib", "snapshot_mib", "leader_cpu_s", "payloads")


def run(days: float, workers: int, groups: int, out: Path) -> dict[str, Any]:
    logging.disable(logging.WARNING)
    machine = runs.machine()
    gc.set_threshold(20_000, 20, 50)  # as in the controller
    began, began_cpu = time.monotonic(), time.process_time()
    world = LongRun(1, shape_of(workers, POLICIES, groups, STEP_S), BAD_HOSTS)
    world.plan()
    samples = Samples(world)
    found: dict[str, Any] = {}
    for hour in range(1, round(days * DAY / HOUR) + 1):
        world.timeline.run(hour * HOUR, lambda: False)
        samples.take(hour)
        took_s = time.monotonic() - began
        found = {
            "machine": machine,
            "days": hour / 24,
            "workers": workers,
            "replicas": POLICIES,
            "groups_per_step": groups,
            "step_minutes": STEP_S * STRETCH / 60,
            "stretch": STRETCH,
            "steps": world.steps,
            "events": sum(world.oracle.counts.values()),
            "events_by_kind": dict(world.oracle.counts.most_common()),
            "faults": dict(world.faults),
            "took_s": round(took_s, 1),
            "cpu_s": round(time.process_time() - began_cpu, 1),
            "rows": samples.rows,
        }
        if hour > SETTLED_H + 3:
            found["growth"] = {name: growth(samples.rows, name) for name in GROWTH}
        if hour % 6 == 0:
            runs.write(out, found)
    world.timeline.close()
    return found


def main() -> None:
    parser = runs.options("scale.week", __doc__, "week")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=125, help="groups of a step")
    parser.add_argument("--picture", action="store_true", help="draw the curves of the results")
    args = parser.parse_args()
    if not args.picture:
        found = run(args.days, args.workers, args.groups, args.out)
        runs.write(args.out, found)
    draw(json.loads(args.out.read_text()), PICTURE)


CURVES = (
    ("leader_mib", "memory of the leader, MiB"),
    ("journal_mib", "journal in Redis, MiB"),
    ("snapshot_mib", "snapshot in Redis, MiB"),
    ("leader_cpu_s", "CPU of the leader, s a virtual hour"),
)


def draw(found: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 8.0), layout="constrained")
    axes = figure.subplots(3, 2).ravel()
    rows = found["rows"]
    for axis, (name, label) in zip(axes, CURVES, strict=False):
        points = [(row["hour"] / 24, row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), lw=1.0)
        axis.set_ylim(bottom=0)
        axis.set_title(label, fontsize=10)
    axes[4].plot([row["hour"] / 24 for row in rows], [row["steps"] for row in rows], lw=1.0)
    axes[4].set_ylim(bottom=0)
    axes[4].set_title("steps a virtual hour", fontsize=10)
    faults = [fault for row in rows for fault in row["recoveries"]]
    for kind in sorted({fault["fault"] for fault in faults}):
        own = [(f["hour"] / 24, f["seconds"]) for f in faults if f["fault"] == kind]
        axes[5].scatter(*zip(*own, strict=True), s=8, label=kind)
    axes[5].set_title("no commit after a fault for, s of the controllers' clock", fontsize=10)
    axes[5].legend(fontsize=7)
    for axis in axes:
        axis.set_xlabel("virtual days", fontsize=8)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
