"""Time, memory and size of a timeline: its fold alone, as a controller does it, and as a file.

    python -m benchmarks.timeline [--out FILE]

The events are those of a run in which each rollout worker makes one group a step, serves each
version, and eight replicas train: three events of each worker and ten others a step. Every size is
measured in a process of its own. A controller's journal holds 20,000 to 40,000 events.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import runs
from paceline.observe.swim_lanes import SwimLanes
from paceline.observe.timeline import Timeline
from paceline.observe.trace_file import TraceWriter

GROWTH = (1, 2, 4, 8)
WORKERS, STEPS = 250, 10
REPLICAS = 8
STEP_S = 30.0


def events_of(workers: int, steps: int) -> Iterator[tuple[float, Mapping[str, Any]]]:
    yield 0.0, {"type": "RunStarted"}
    yield 0.0, {"type": "TermBegun", "term": 1, "controller_id": "controller-0"}
    names = [f"rollout-{n}" for n in range(workers)]
    replicas = [f"policy-{n}" for n in range(REPLICAS)]
    for role, of_role in (("rollout", names), ("policy", replicas)):
        for name in of_role:
            seen = {"worker_id": name, "role": role, "pid": 1, "host": "host"}
            yield 0.0, {"type": "WorkerRegistered", **seen}
    stats = {f"time_{part}_s": (s, 1.0, s) for part, s in (("wait", 9.0), ("compute", 15.0))}
    for step in range(1, steps + 1):
        begin, tasks = step * STEP_S, [f"t{step * workers + n}" for n in range(workers)]
        for n, (name, task) in enumerate(zip(names, tasks, strict=True)):
            lease = [task, 1, "train", 0, n, 7, ""]
            yield begin + n / workers, {"type": "TasksLeased", "worker_id": name, "leases": [lease]}
        for n, (name, task) in enumerate(zip(names, tasks, strict=True)):
            group = {"task_id": task, "attempt": 1, "tokens": 512, "reward_mean": 0.5}
            yield (
                begin + 9 + n / workers,
                {"type": "GroupAccepted", "worker_id": name, "group": group},
            )
        shards = {r: list(range(n, workers, REPLICAS)) for n, r in enumerate(replicas)}
        opened = {"type": "StepOpened", "step": step, "groups": tasks, "shards": shards}
        yield begin + 10.0, opened
        for replica in replicas:
            voted = {"type": "VoteCast", "worker_id": replica, "step": step, "stats": stats}
            yield begin + 26.0, voted
        done = {"type": "StepCommitted", "step": step, "version": step, "metrics": {}}
        yield begin + 26.0, done
        for n, name in enumerate(names):
            served = {"lifecycle": "running", "state_version": -1, "loaded_version": step}
            yield begin + 27 + n / workers, {"type": "WorkerChanged", "worker_id": name, **served}


def folded(workers: int, steps: int, take: Callable[[float, Mapping[str, Any]], None]) -> int:
    count = 0
    for count, (t, record) in enumerate(events_of(workers, steps), start=1):  # noqa: B007
        take(t, record)
    return count


def measure(workers: int, steps: int) -> dict[str, float]:
    begun = time.process_time()
    count = folded(workers, steps, lambda t, record: None)
    made = time.process_time()
    lanes = SwimLanes()
    folded(workers, steps, lanes.timeline.take)
    kept = time.process_time()
    shown = json.dumps(lanes.window((steps + 1) * STEP_S, 300.0, 300))
    asked = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        with TraceWriter(path) as writer:
            timeline = Timeline(writer.write)
            writer.begin(0.0, timeline.roles)
            folded(workers, steps, timeline.take)
        size = path.stat().st_size
    written = time.process_time()
    making = made - begun
    return {
        "workers": workers,
        "steps": steps,
        "events": count,
        "fold_us_an_event": (kept - made - making) / count * 1e6,
        "window_ms": (asked - kept) * 1e3,
        "window_kb": len(shown) / 1e3,
        "file_us_an_event": (written - asked - making) / count * 1e6,
        "file_mb": size / 1e6,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def main() -> None:
    parser = runs.options("timeline", __doc__, "timeline")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    rows = []
    sizes = [(WORKERS, STEPS * by) for by in GROWTH] + [(WORKERS * by, STEPS) for by in GROWTH[1:]]
    for size in sizes:
        words = [sys.executable, "-m", "benchmarks.timeline", "--one", *map(str, size)]
        rows.append(json.loads(subprocess.check_output(words, cwd=runs.REPOSITORY)))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    runs.write(args.out, {"machine": runs.machine(), "rows": rows})


if __name__ == "__main__":
    main()
