"""Runs of ``paceline up`` for benchmarks: their rates and CPU times.

The clock starts at the commit of the last warm-up step and stops at the commit of the last step:
imports, start-up, the first weights transfer and the export at the end are no part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline.observe.fleet_file import FleetRecord
from paceline.worker_pools import role_of

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / "examples" / "digit_sort"
RESULTS = REPOSITORY / "benchmarks" / "results"
SCRATCH = REPOSITORY / "runs" / "bench"
ONE_OF_EACH = {"fleet.controllers": 1, "fleet.policy": 1, "fleet.rollout": 1}


@dataclass(frozen=True, slots=True)
class Fleet:
    """Measurements of a run, warm-up steps left out."""

    samples_per_s: float
    step_s: float
    steps: int
    means: Mapping[str, float]
    """Mean of each step metric."""
    rewards: Sequence[float]
    """Training reward of every step, warm-up included; empty if nothing was sampled."""
    cpu_s_per_step: Mapping[str, float]
    """CPU seconds by role."""
    memory: Mapping[str, int]
    """Peaks in bytes: by role, of the largest process (resident); "pair", of replicas and rollout
    workers together, and "workers", of all (their shares of what several have mapped)."""
    summary: Mapping[str, Any]
    run_dir: Path = field(repr=False)


def run_fleet(
    name: str,
    overrides: Mapping[str, Any],
    *,
    warm_up: int,
    config: Path = DEMO / "digit_sort.toml",
    timeout_s: float = 900.0,
    fresh: bool = True,
) -> Fleet:
    """Runs the demo's config with ``overrides`` in runs/bench/``name``: dotted names or tables.

    The fleet has one controller, one policy replica and one rollout worker if no override says
    otherwise. Without ``fresh`` it continues the run that is there. Raises RuntimeError, with the
    end of its output, if the run fails.
    """
    run_dir = SCRATCH / name
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [str(Path(sysconfig.get_path("scripts")) / "paceline"), "up", str(config)]
    command += ["--run-dir", str(run_dir), *(["--fresh"] if fresh else [])]
    settings = {"run.name": name.replace("/", "-"), **ONE_OF_EACH, **dotted(overrides)}
    for key, value in settings.items():
        command += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    watch = _CpuWatch()
    with (run_dir.parent / f"{run_dir.name}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )
        watch.start(process.pid, run_dir)
        try:
            status = process.wait(timeout_s)
        finally:
            watch.stop()
            if process.poll() is None:
                process.terminate()
                process.wait(30)
    if status != 0:
        tail = Path(log.name).read_text()[-2000:]
        raise RuntimeError(f"{name}: paceline up ended with status {status}\n{tail}")
    return _read(run_dir, warm_up, watch)


def metrics(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Rows of the run's metrics of one kind (step or eval), by step."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == kind]
    return sorted(rows, key=lambda row: int(row["step"]))


def _read(run_dir: Path, warm_up: int, watch: _CpuWatch) -> Fleet:
    rows = metrics(run_dir, "step")
    measured = rows[warm_up:]
    begun, ended = rows[warm_up - 1]["t"], rows[-1]["t"]
    seconds = ended - begun
    names = [n for n, v in measured[-1].items() if isinstance(v, int | float)]
    return Fleet(
        samples_per_s=sum(row["samples"] for row in measured) / seconds,
        step_s=seconds / len(measured),
        steps=len(rows),
        means={
            n: sum(row.get(n) or 0.0 for row in measured) / len(measured)
            for n in names
            if n not in ("t", "step", "version", "n")
        },
        rewards=[row["reward_mean"] for row in rows if "reward_mean" in row],
        cpu_s_per_step={
            role: used / len(measured) for role, used in watch.between(begun, ended).items()
        },
        memory=watch.peaks,
        summary=json.loads((run_dir / "summary.json").read_text()),
        run_dir=run_dir,
    )


class _CpuWatch:
    """Samples the CPU time of a fleet's processes a few times a second, by role; and once a second
    the memory of its workers."""

    INTERVAL_S = 0.25
    WORKERS = ("policy", "rollout", "scorer")

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._over = threading.Event()
        self._samples: list[tuple[float, dict[str, float]]] = []

    def start(self, pid: int, run_dir: Path) -> None:
        self._thread = threading.Thread(target=self._run, args=(pid, run_dir), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def between(self, begun: float, ended: float) -> dict[str, float]:
        """CPU seconds by role between two unix times, from the nearest samples."""
        if len(self._samples) < 2:
            return {}
        first = min(self._samples, key=lambda s: abs(s[0] - begun))[1]
        last = min(self._samples, key=lambda s: abs(s[0] - ended))[1]
        return {role: last[role] - first.get(role, 0.0) for role in last}

    def _run(self, pid: int, run_dir: Path) -> None:
        roles: dict[int, str] = {}
        # A process that has ended keeps what it used: else a role would shrink at the end of a run.
        spent: dict[int, float] = {}
        while not self._over.wait(self.INTERVAL_S):
            recorded = _recorded(run_dir)
            if len(self._samples) % 4 == 0:
                self._look_at_memory(recorded)
            for process in _processes(pid, recorded):
                try:
                    times, parent = process.cpu_times(), process.ppid()
                except psutil.Error:
                    continue
                # Anew each time: a process runs for a moment before it is recorded. What it starts,
                # a pool of rewards for example, counts for its role.
                roles[process.pid] = recorded.get(process.pid) or roles.get(parent, "supervisor")
                spent[process.pid] = times.user + times.system
            used: dict[str, float] = {}
            for number, seconds in spent.items():
                used[roles[number]] = used.get(roles[number], 0.0) + seconds
            self._samples.append((time.time(), used))

    def _look_at_memory(self, recorded: Mapping[int, str]) -> None:
        found = dict.fromkeys(("pair", "workers"), 0)
        for number, pool in recorded.items():
            if (role := role_of(pool)) not in self.WORKERS:
                continue
            try:
                size = psutil.Process(number).memory_full_info()
            except psutil.Error:
                continue
            found[role] = max(found.get(role, 0), size.rss)
            found["workers"] += size.pss
            found["pair"] += size.pss if role != "scorer" else 0
        self.peaks |= {name: max(n, self.peaks.get(name, 0)) for name, n in found.items()}


def _recorded(run_dir: Path) -> dict[int, str]:
    """Roles by process id, as the launcher has recorded them."""
    record = FleetRecord.read(run_dir)
    if record is None:
        return {}
    redis = {one.pid: "redis" for one in record.redis if one.alive()}
    return redis | {one.pid: process.role for process in record.processes for one in process.ids}


def _processes(pid: int, recorded: Mapping[int, str]) -> list[psutil.Process]:
    """``pid`` and its descendants, each after its parent, and Redis, which outlives its starter."""
    try:
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
        known = {process.pid for process in found}
        more = [n for n, role in recorded.items() if role == "redis" and n not in known]
        return [*found, *map(psutil.Process, more)]
    except psutil.Error:
        return []


def dotted(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, from tables within tables."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        key = f"{prefix}{name}"
        found |= dotted(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found


def given(settings: Sequence[str]) -> dict[str, str]:
    """Overrides of ``--set A.B=C``."""
    return dict(item.split("=", 1) for item in settings)


def machine() -> dict[str, Any]:
    """Description of the machine, for readers who compare numbers."""
    import torch

    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def model_of(size: str) -> Path:
    """The warm-started model; the larger one is trained once and kept in runs/bench."""
    if size == "0.1M":
        return DEMO / "model-0.1M"
    path = SCRATCH / f"model-{size}"
    if not (path / "tokenizer.json").is_file():
        subprocess.run(
            [
                *(sys.executable, "-m", "examples.digit_sort.warm_start"),
                *("--size", size, "--out", str(path)),
            ],
            cwd=REPOSITORY,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    return path


def dropped_share(summary: Mapping[str, Any], group_size: int = 8) -> float:
    """Share of the generated groups that were dropped for their age."""
    dropped = summary["groups_dropped"]
    late = dropped.get("stale", 0) + dropped.get("expired", 0)
    share: float = late / (late + summary["samples_trained"] / group_size)
    return share


def exact_match(model_dir: Path) -> float:
    """Greedy exact match on all held-out prompts."""
    rows = [json.loads(line) for line in (DEMO / "held_out.jsonl").read_text().splitlines()]
    return sum(right_answers(model_dir, rows)) / len(rows)


def right_answers(
    model_dir: Path, rows: Sequence[Mapping[str, str]], max_tokens: int = 24
) -> list[bool]:
    """Exactness of the model's greedy answer to each row, through transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model.generate(**prompts, max_new_tokens=max_tokens, do_sample=False)
    start = prompts["input_ids"].shape[1]
    return [
        tokenizer.eos_token_id in tokens
        and tokenizer.decode(tokens, skip_special_tokens=True) == row["answer"]
        for row, tokens in zip(rows, output[:, start:].tolist(), strict=True)
    ]


def options(module: str, about: str | None, result: str) -> argparse.ArgumentParser:
    """Command line of ``python -m benchmarks.MODULE``, with ``--out`` for its result file."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"{result}.json", help="default: %(default)s"
    )
    return parser


class Results:
    """Result file of a measurement: rows of several calls, written after each run.

    A measurement that is cut short leaves what it has. A row that is measured again replaces the
    row with the same values of the fields ``key``; without a key rows are added.
    """

    def __init__(self, out: Path, *key: str) -> None:
        self.data: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
        self.data["machine"] = machine()
        self._out, self._key = out, key

    @property
    def runs(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self.data.setdefault("runs", [])
        return rows

    def add(
        self,
        row: dict[str, Any],
        about: Callable[[list[dict[str, Any]]], Mapping[str, Any]] = lambda rows: {},
    ) -> None:
        """Adds a row, and ``about`` of all rows."""
        print(json.dumps(row), file=sys.stderr, flush=True)
        key = [row[field] for field in self._key]
        again = (bool(key) and [old[field] for field in self._key] == key for old in self.runs)
        self.runs[:] = [old for old, gone in zip(self.runs, again, strict=True) if not gone]
        self.runs.append(row)
        self.data |= about(self.runs)
        write(self._out, self.data)


def write(out: Path, result: Mapping[str, Any]) -> None:
    """Writes a result file, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_suffix(".new")
    new.write_text(json.dumps(result, indent=2) + "\n")
    new.replace(out)
    print(f"written to {out}", flush=True)
