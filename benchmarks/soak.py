"""Memory, files and threads of each process of a small fleet that runs for hours.

    nice -n 19 python -m benchmarks.soak --hours 8

The demo's fleet (two controllers, two replicas, two rollout workers, and Redis) trains on without
an end, and is stopped after that time. A point a minute for each process, and of the run
directory. Each point is written at once, so a machine that stops loses nothing: ``--continue``
goes on with that run, in new processes. Growth is fitted to the second halves of such parts,
because caches fill in the first. Ctrl-C ends a part early. With ``--again`` nothing runs: the
picture is drawn again from the result.
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
    parser.add_argument("--hours", type=float, default=8.0, help="of this part")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between points")
    parser.add_argument("--continue", action="store_true", dest="go_on", help="the last run")
    parser.add_argument("--again", action="store_true", help="draw the picture of the last result")
    args = parser.parse_args()
    if not args.again:
        result = json.loads(args.out.read_text()) if args.go_on else {"parts": []}
        soak(args.hours, args.every, result, args.out)
    parts = json.loads(args.out.read_text())["parts"]
    draw([part for part in parts if part["points"]])


def soak(hours: float, every: float, result: dict[str, Any], out: Path) -> None:
    """Runs a part for ``hours``, looks at it each ``every`` seconds, and adds it to ``result``."""
    run_dir = runs.SCRATCH / "soak"
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sysconfig.get_path("scripts")) / "paceline"), "up"]
    command += [str(runs.DEMO / "digit_sort.toml"), "--run-dir", str(run_dir)]
    command += ["--set", f"train.steps={ENDLESS}", "--set", "train.optimizer.schedule=constant"]
    command += [] if result["parts"] else ["--fresh"]
    points: list[dict[str, Any]] = []
    result["parts"].append({"machine": runs.machine(), "points": points})
    begun = time.monotonic()
    with (run_dir.parent / "soak.log").open("a") as log:
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
                    runs.write(out, result | {"growth_an_hour": growths(result["parts"])})
        except KeyboardInterrupt:
            pass
        finally:
            fleet.send_signal(signal.SIGTERM)
            fleet.wait(STOP_S)
    summary = json.loads((run_dir / "summary.json").read_text())
    kept = ("samples_lost", "samples_duplicated", "ledger_ok")
    result |= {name: summary.get(name) for name in kept}
    runs.write(out, result | {"growth_an_hour": growths(result["parts"])})


def point(run_dir: Path, hours: float) -> dict[str, Any]:
    """Of each process by its name: memory that it shares with none (USS), open files, threads, and
    CPU seconds."""
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
                    "memory": process.memory_full_info().uss / (1 << 20),
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


def growths(parts: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What each process adds in an hour: the slope that the second halves of all parts share."""
    found: dict[str, dict[str, float]] = {}
    for name in names(parts):
        found[name] = {}
        for measure in MEASURES:
            hours, values = [], []
            for part in parts:
                half = part["points"][len(part["points"]) // 2 :]
                if not (seen := [p for p in half if name in p["processes"]]):
                    continue
                x = [p["hours"] for p in seen]
                y = [p["processes"][name][measure] for p in seen]
                hours += [at - statistics.fmean(x) for at in x]
                values += [at - statistics.fmean(y) for at in y]
            if len(set(hours)) > 1:
                slope = statistics.linear_regression(hours, values, proportional=True).slope
                found[name][measure] = slope
    return found


def names(parts: list[dict[str, Any]]) -> list[str]:
    """Processes, as the newest point has them."""
    points = [point for part in parts for point in part["points"]]
    return list(points[-1]["processes"]) if points else []


def draw(parts: list[dict[str, Any]]) -> None:
    """Curves of the measures by process, a part after the other."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, (measure, unit) in zip(figure.subplots(1, 3), MEASURES.items(), strict=True):
        for number, name in enumerate(names(parts)):
            before = 0.0
            for part in parts:
                seen = [p for p in part["points"] if name in p["processes"]]
                x = [before + p["hours"] for p in seen]
                y = [p["processes"][name][measure] for p in seen]
                label = name if part is parts[0] else None
                axes.plot(x, y, label=label, lw=1, color=f"C{number}")
                before += part["points"][-1]["hours"]
        axes.set(xlabel="hours", title=unit)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="x-small")
    figure.savefig(PICTURE, dpi=128)


if __name__ == "__main__":
    main()
