"""Memory, files and threads of each process of a small fleet that runs for hours.

    nice -n 19 python -m benchmarks.soak --hours 8

The demo's fleet (two controllers, two replicas, two rollout workers, and Redis) trains on without
an end, and is stopped after that time. A point a minute for each process, and of the run
directory; growth is fitted to the second half of the run, because caches fill in the first. Ctrl-C
ends it early and keeps what it has. With ``--again`` nothing runs: the picture is drawn again from
the result.
"""

import json
import signal
import statistics
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import Any

import psutil
from matplotlib.figure import Figure

from benchmarks import runs
from paceline.observe.fleet_file import FleetRecord

PICTURE = runs.REPOSITORY / "docs" / "images" / "soak.png"
ENDLESS = 10_000_000
"""Steps that the run never reaches."""
STOP_S = 300.0
MEASURES = {"memory": "MiB", "files": "open files", "threads": "threads"}


def main() -> None:
    parser = runs.options("soak", __doc__, "soak")
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between points")
    parser.add_argument("--again", action="store_true", help="draw the picture of the last result")
    args = parser.parse_args()
    if not args.again:
        machine = runs.machine()
        found = soaked(args.hours, args.every)
        result = {"machine": machine, **found, "growth_an_hour": growths(found["points"])}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    draw(json.loads(args.out.read_text()))


def soaked(hours: float, every: float) -> dict[str, Any]:
    run_dir = runs.SCRATCH / "soak"
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sysconfig.get_path("scripts")) / "paceline"), "up"]
    command += [str(runs.DEMO / "digit_sort.toml"), "--run-dir", str(run_dir), "--fresh"]
    command += ["--set", f"train.steps={ENDLESS}", "--set", "train.optimizer.schedule=constant"]
    begun = time.monotonic()
    points: list[dict[str, Any]] = []
    with (run_dir.parent / "soak.log").open("w") as log:
        fleet = subprocess.Popen(
            command,
            cwd=runs.REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process
        )
        try:
            while (passed := time.monotonic() - begun) < hours * 3600:
                try:
                    fleet.wait(min(every, hours * 3600 - passed))
                    raise RuntimeError(f"the run has ended: {log.name}")
                except subprocess.TimeoutExpired:
                    points.append(point(run_dir, (time.monotonic() - begun) / 3600))
        except KeyboardInterrupt:
            hours = (time.monotonic() - begun) / 3600
        finally:
            fleet.send_signal(signal.SIGTERM)
            fleet.wait(STOP_S)
    summary = json.loads((run_dir / "summary.json").read_text())
    kept = ("steps", "samples_lost", "samples_duplicated", "ledger_ok")
    return {"hours": hours, **{name: summary.get(name) for name in kept}, "points": points}


def point(run_dir: Path, hours: float) -> dict[str, Any]:
    """Of each process by its name: memory that it shares with none or its part of it (PSS), open
    files, threads, and CPU seconds."""
    record = FleetRecord.read(run_dir)
    names = {"supervisor": record.supervisor.pid, "redis": record.redis[0].pid} if record else {}
    for process in record.processes if record else ():
        if process.ids:
            names[process.name] = process.ids[-1].pid
    seen: dict[str, dict[str, float]] = {}
    for name, number in names.items():
        try:
            process = psutil.Process(number)
            with process.oneshot():
                times = process.cpu_times()
                seen[name] = {
                    "memory": process.memory_full_info().pss / (1 << 20),
                    "files": process.num_fds(),
                    "threads": process.num_threads(),
                    "cpu_s": times.user + times.system,
                    "pid": number,
                }
        except psutil.Error:
            continue
    size = sum(file.stat().st_size for file in run_dir.rglob("*") if file.is_file())
    line = (run_dir / "metrics.jsonl").read_text().splitlines()[-1:]
    step = json.loads(line[0])["step"] if line else 0
    return {"hours": hours, "step": step, "run_dir": size / (1 << 20), "processes": seen}


def growths(points: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What each process adds in an hour, by least squares over the second half."""
    half = points[len(points) // 2 :]
    found: dict[str, dict[str, float]] = {}
    for name in half[-1]["processes"]:
        seen = [(p["hours"], p["processes"][name]) for p in half if name in p["processes"]]
        hours = [hour for hour, _ in seen]
        found[name] = {
            measure: statistics.linear_regression(hours, [at[measure] for _, at in seen]).slope
            for measure in MEASURES
        }
    return found


def draw(found: dict[str, Any]) -> None:
    """Curves of the measures by process."""
    points = found["points"]
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (measure, unit) in zip(figure.subplots(1, 3), MEASURES.items(), strict=True):
        for name in points[-1]["processes"]:
            line = [(p["hours"], p["processes"][name]) for p in points if name in p["processes"]]
            axes.plot([x for x, _ in line], [y[measure] for _, y in line], label=name, lw=1)
        axes.set(xlabel="hours", title=unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="x-small")
    figure.savefig(PICTURE, dpi=128)


if __name__ == "__main__":
    main()
