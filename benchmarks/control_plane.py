"""Throughput of the controller's leader: durable groups per second.

    python -m benchmarks.control_plane [--clients 1 8 64] [--seconds 15] [--groups-total 100000]

A real leader process with a real Redis (append-only file, fsync every second) serves K rollout
clients and one policy replica, which are spread over two processes. Each client
has a connection and a session of its own. The loop is closed:

- A rollout client leases 8 tasks in one request. It stores the payload of each group, 16
  completions of 256 (or 16) token ids with log-probabilities, and submits the metadata of each
  group in a request of its own, or of ``--groups-a-submit`` groups together. A real worker sends
  together what was finished within 10 ms. It waits for the verdict, and leases again when all
  groups are accepted.
- The policy replica asks for the next plan, votes, and records a checkpoint when one is due.
- Every reply leaves the leader only after its events are in Redis.

A step is 256 groups (4,096 samples). ``max_staleness`` is high, so that no lease waits for
training. A group counts if its verdict arrived within the measured window. Latencies are those of
single requests; that of a submission includes storing the payload. ``leader_cpu`` is the leader's
share of one core; ``groups_per_cpu_s`` is the rate that it would reach with a core of its own. Load
and leader share the machine's cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks import runs
from benchmarks.control_plane_load import KINDS
from paceline.rpc.auth import TOKEN_FILE
from testbed.fleets.controller_processes import Controllers, write_config

PAYLOADS = {"16x256": 256, "16x16": 16}
COMPLETIONS = 16
LOAD_PROCESSES = 2
TASKS = 8
"""Tasks a lease."""
LOOK_S = 0.25


def main() -> None:
    parser = runs.options("control_plane", __doc__, "control_plane")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--payloads", nargs="+", choices=PAYLOADS, default=list(PAYLOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="measured window of each row")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before it")
    parser.add_argument("--groups-a-submit", type=int, default=1, help="1 to 8")
    parser.add_argument(
        "--groups-total", type=int, default=0, help="one more row: growth over so many"
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    runs.write(args.out, {"machine": runs.machine(), "rows": _rows(args)})


def _rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    cells = [(payload, clients, 0) for payload in args.payloads for clients in args.clients]
    if args.groups_total:
        cells.append(("16x16", 64, args.groups_total))
    rows = []
    for cell in cells:
        rows.append(_measure(args, *cell))
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _measure(args: argparse.Namespace, payload: str, clients: int, total: int) -> dict[str, Any]:
    """One row: a fresh run with its own Redis and leader."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        directory = Path(name)
        config = write_config(
            directory,
            train={
                "steps": 1_000_000,
                "groups_per_step": 256,
                "max_staleness": 16,
                "checkpoint_every": 20,
            },
            rollout={"group_size": COMPLETIONS, "max_tokens": PAYLOADS[payload]},
            archive={"enabled": False},
        )
        with Controllers(directory, config) as controllers:
            leader = controllers.start()
            order = {
                "config": str(config),
                "token_file": str(controllers.run_dir / TOKEN_FILE),
                "address": leader.address,
                "tokens": PAYLOADS[payload],
                "tasks": TASKS,
                "groups_a_submit": args.groups_a_submit,
                "warm_up": args.warm_up,
            }
            load = _Load(order, clients, LOAD_PROCESSES)
            row = _window(load, psutil.Process(leader.pid), args.seconds, total, PAYLOADS[payload])
    return {"payload": payload, "clients": clients, **row}


class _Load:
    """The load processes of one row."""

    def __init__(self, order: dict[str, Any], clients: int, processes: int) -> None:
        shares = [range(number, clients, processes) for number in range(processes)]
        orders = [
            {**order, "clients": list(share), "policy": number == 0}
            for number, share in enumerate(shares)
            if share or number == 0
        ]
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.control_plane_load", json.dumps(order)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for order in orders
        ]
        for line in self._answers():
            if line != "ready\n":
                raise SystemExit(f"a load process failed: {line!r}")

    def begin(self) -> None:
        self._order("begin")

    def groups(self) -> int:
        self._order("count")
        return sum(map(int, self._answers()))

    def end(self) -> list[dict[str, Any]]:
        self._order("end")
        found = [json.loads(line) for line in self._answers()]
        for process in self._processes:
            process.wait()
        return found

    def _order(self, word: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{word}\n")
            process.stdin.flush()

    def _answers(self) -> list[str]:
        return [p.stdout.readline() for p in self._processes if p.stdout is not None]


def _window(
    load: _Load, leader: psutil.Process, seconds: float, total: int, tokens: int
) -> dict[str, Any]:
    """Measures for ``seconds``, or until ``total`` groups were accepted if that is not 0."""
    rss = [leader.memory_info().rss]
    load.begin()
    before, began = leader.cpu_times(), time.perf_counter()
    while load.groups() < total if total else time.perf_counter() - began < seconds:
        time.sleep(LOOK_S)
        rss.append(leader.memory_info().rss)
    after = leader.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return _summary(load.end(), cpu_s, rss, tokens)


def _summary(
    measured: list[dict[str, Any]], cpu_s: float, rss: list[int], tokens: int
) -> dict[str, Any]:
    times = {kind: [t for load in measured for t in load[kind]] for kind in KINDS}
    requests = [t for found in times.values() for t in found]
    seconds = max(load["seconds"] for load in measured)
    groups = sum(load["groups"] for load in measured)

    def ms(values: list[float], q: float) -> float:
        return float(np.percentile(values, q) * 1e3) if values else 0.0

    third = len(rss) // 3
    return {
        "groups": groups,
        "seconds": seconds,
        "groups_per_s": groups / seconds,
        "tokens_per_s": groups * COMPLETIONS * tokens / seconds,
        "steps_per_s": sum(load["steps"] for load in measured) / seconds,
        "requests_per_s": len(requests) / seconds,
        "p50_ms": ms(requests, 50),
        "p99_ms": ms(requests, 99),
        **{f"{kind}_p99_ms": ms(found, 99) for kind, found in times.items()},
        "leader_cpu": cpu_s / seconds,
        "load_cpu": sum(load["cpu_s"] for load in measured) / seconds,
        "groups_per_cpu_s": groups / cpu_s if cpu_s else 0.0,
        "rss_first_mb": max(rss[: third + 1]) / 2**20,
        "rss_mb": max(rss) / 2**20,
        "refused": sum(load["refused"] for load in measured),
        "errors": sum(load["errors"] for load in measured),
    }


if __name__ == "__main__":
    main()
