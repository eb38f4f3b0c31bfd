"""Throughput of the controller's leader: durable groups per second.

    python -m benchmarks.control_plane [--clients 1 8 64] [--seconds 15] [--groups-total 100000]

A real leader process with a real Redis (append-only file, fsync every second) serves a load
generator, which is a process of its own with K rollout clients and one policy replica. Each client
has a connection and a session of its own. The loop is closed:

- A rollout client leases ``--tasks`` tasks in one request. It submits each group in a request of its
  own: 16 completions of 256 (or 16) token ids with log-probabilities and one version span each. It
  waits for the verdict, and leases again when all groups are accepted.
- The policy replica asks for the next plan, votes, and records a checkpoint when one is due. With
  ``--fetch`` it reads the payloads of its shard before it votes, as a trainer does.
- With ``--groups-a-submit`` above 1, a client submits that many groups in one request.
- Every reply leaves the leader only after its events are in Redis.

A step is 256 groups (4,096 samples). ``max_staleness`` is high, so that no lease waits for training. A
group counts if its verdict arrived within the measured window. Latencies are those of single requests.
``leader_cpu`` is the leader's share of one core; ``groups_per_cpu_s`` is the rate that it would reach
with a core of its own. Load generator and leader share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.rpc.auth import TOKEN_FILE
from testbed.fleets.controller_processes import Controllers, write_config

PAYLOADS = {"16x256": 256, "16x16": 16}
COMPLETIONS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--payloads", nargs="+", choices=PAYLOADS, default=list(PAYLOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="measured window of each row")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before it")
    parser.add_argument("--tasks", type=int, default=8, help="tasks a lease")
    parser.add_argument("--groups-a-submit", type=int, default=1)
    parser.add_argument("--archive", action="store_true", help="the leader archives samples")
    parser.add_argument("--fetch", action="store_true", help="the policy replica reads payloads")
    parser.add_argument(
        "--groups-total", type=int, default=0, help="one more row: growth over so many"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/control_plane.json"))
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    if args.load:
        asyncio.run(_load(json.loads(args.load)))
        return
    rows = []
    for payload in args.payloads:
        for clients in args.clients:
            rows.append(_measure(args, payload, clients, args.seconds, 0))
            _print_row(rows[-1], header=len(rows) == 1)
    if args.groups_total:
        rows.append(_measure(args, "16x16", 64, 0.0, args.groups_total))
        _print_row(rows[-1], header=False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "tasks_a_lease": args.tasks,
        "groups_a_submit": args.groups_a_submit,
        "fetch": args.fetch,
    }
    args.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    print(f"written to {args.out}")


def _print_row(row: dict[str, Any], *, header: bool) -> None:
    columns = {
        "payload": 8,
        "clients": 8,
        "groups_per_s": 13,
        "tokens_per_s": 13,
        "steps_per_s": 12,
        "p50_ms": 8,
        "p99_ms": 8,
        "lease_p99_ms": 13,
        "submit_p99_ms": 14,
        "leader_cpu": 11,
        "load_cpu": 9,
        "groups_per_cpu_s": 17,
        "rss_first_mb": 13,
        "rss_mb": 8,
    }
    if header:
        print("".join(name.rjust(width) for name, width in columns.items()), flush=True)
    cells = []
    for name, width in columns.items():
        value = row[name]
        cells.append((f"{value:.4g}" if isinstance(value, float) else str(value)).rjust(width))
    print("".join(cells), flush=True)


def _measure(
    args: argparse.Namespace, payload: str, clients: int, seconds: float, total: int
) -> dict[str, Any]:
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
            archive={"enabled": args.archive},
        )
        with Controllers(directory, config) as controllers:
            leader = controllers.start()
            order = {
                "config": str(config),
                "token_file": str(controllers.run_dir / TOKEN_FILE),
                "address": leader.address,
                "pid": leader.pid,
                "clients": clients,
                "tokens": PAYLOADS[payload],
                "tasks": args.tasks,
                "groups_a_submit": args.groups_a_submit,
                "fetch": args.fetch,
                "warm_up": args.warm_up,
                "seconds": seconds,
                "total": total,
            }
            output = subprocess.run(
                [sys.executable, "-m", "benchmarks.control_plane", "--load", json.dumps(order)],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
    return {"payload": payload, "clients": clients, **json.loads(output)}


async def _load(order: dict[str, Any]) -> None:
    """The load process; prints one JSON object."""
    import psutil

    from paceline.config.load import load_config
    from testbed.workers.fake_workers import FakePolicy, FakeRollout, Timings

    config = load_config(order["config"], [f"auth.token_file={order['token_file']}"])
    addresses = [order["address"]]
    policy = FakePolicy(config, addresses, "policy-0", fetch=order["fetch"])
    rollouts = [
        FakeRollout(
            config,
            addresses,
            f"rollout-{i}",
            tokens=order["tokens"],
            tasks_a_lease=order["tasks"],
            groups_a_submit=order["groups_a_submit"],
        )
        for i in range(order["clients"])
    ]
    workers = [policy, *rollouts]
    await asyncio.gather(*(worker.start() for worker in workers))
    ended = False
    tasks = [asyncio.create_task(worker.work(lambda: ended)) for worker in workers]
    leader = psutil.Process(order["pid"])
    await asyncio.sleep(order["warm_up"])
    for worker in workers:
        worker.timings = Timings()
    rss = [leader.memory_info().rss]
    cpu, own = leader.cpu_times(), time.process_time()
    began = time.perf_counter()

    def groups() -> int:
        return sum(rollout.timings.groups for rollout in rollouts)

    while (
        groups() < order["total"]
        if order["total"]
        else time.perf_counter() - began < order["seconds"]
    ):
        await asyncio.sleep(0.25)
        rss.append(leader.memory_info().rss)
    seconds = time.perf_counter() - began
    after = leader.cpu_times()
    cpu_s = after.user + after.system - cpu.user - cpu.system
    load_cpu_s = time.process_time() - own
    counted = groups()
    result = _summary(workers, counted, seconds, cpu_s, rss, order["tokens"])
    result["load_cpu"] = load_cpu_s / seconds
    ended = True
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(worker.stop(goodbye=False) for worker in workers))
    json.dump(result, sys.stdout)


def _summary(
    workers: list[Any], groups: int, seconds: float, cpu_s: float, rss: list[int], tokens: int
) -> dict[str, Any]:
    import numpy as np

    times = {
        kind: [t for worker in workers for t in getattr(worker.timings, kind)]
        for kind in ("lease", "submit", "plan", "vote")
    }
    # A plan may have waited for its groups: that is not the leader's doing.
    requests = times["lease"] + times["submit"] + times["vote"]

    def ms(values: list[float], q: float) -> float:
        return float(np.percentile(values, q) * 1e3) if values else 0.0

    third = len(rss) // 3
    return {
        "groups": groups,
        "seconds": seconds,
        "groups_per_s": groups / seconds,
        "tokens_per_s": groups * COMPLETIONS * tokens / seconds,
        "steps_per_s": workers[0].timings.steps / seconds,
        "requests_per_s": len(requests) / seconds,
        "p50_ms": ms(requests, 50),
        "p99_ms": ms(requests, 99),
        "lease_p99_ms": ms(times["lease"], 99),
        "submit_p99_ms": ms(times["submit"], 99),
        "vote_p99_ms": ms(times["vote"], 99),
        "leader_cpu": cpu_s / seconds,
        "groups_per_cpu_s": groups / cpu_s if cpu_s else 0.0,
        "rss_first_mb": max(rss[: third + 1]) / 2**20,
        "rss_mb": max(rss) / 2**20,
        "refused": sum(worker.timings.refused for worker in workers),
        "errors": sum(worker.timings.errors for worker in workers),
    }


if __name__ == "__main__":
    main()
