"""Throughput of fleets of 1 to 8 rollout workers against ideal, and against the same GPUs used in
turns.

    python -m benchmarks.scaling                                   every cell, about 20 minutes
    python -m benchmarks.scaling --workers 8 --staleness 2 5 --slots 32 --repeats 3
    python -m benchmarks.scaling --turns --workers 1 2 --staleness 0 1

Controller, Redis, gRPC and all workers are those that ship. Decoding and training take the times of
emulated GPUs, so that the machine's cores are not the bound. A run with n rollout workers has a
trainer of n GPUs; the baseline is given all 2n. With --turns the 2n GPUs are 2n pairs of a policy
replica and a rollout worker (fleet.sharing), which is the product's own way to use them in turns.
Runs are added to those in the results.
"""

import argparse
import asyncio
import itertools
import os
from dataclasses import asdict, replace
from typing import Any

from benchmarks import runs
from benchmarks.scaling.device_times import DeviceTimes
from benchmarks.scaling.fleet import Cell, measure
from benchmarks.scaling.in_turns import Batch, colocated_rate, generation_rate
from benchmarks.scaling.report import colocated_key

GROUP_SIZE = 4
COLOCATED_STEPS = 8


def main() -> None:
    parser = runs.options("scaling", __doc__, "scaling")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--slots", type=int, nargs="+", default=[16], help="of one engine")
    parser.add_argument("--groups", type=int, nargs="+", default=[32], help="of a step")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell")
    parser.add_argument("--turns", action="store_true", help="pairs that take turns instead")
    parser.add_argument("--window", type=float, default=20.0, help="measured seconds of a run")
    args = parser.parse_args()
    times = DeviceTimes()
    results = runs.Results(args.out)
    found = results.data
    found |= {"times": asdict(times), "group_size": GROUP_SIZE}
    for name in ("alone", "colocated"):
        found.setdefault(name, {})
    for groups, slots in itertools.product(args.groups, args.slots):
        sized, batch = replace(times, slots=slots), Batch(groups, GROUP_SIZE)
        _baselines(found, sized, batch, args)
        for workers, staleness in itertools.product(args.workers, args.staleness):
            cell = Cell(workers, staleness, batch, replace(sized, policy_gpus=workers))
            if args.turns:
                cell = Cell(2 * workers, staleness, batch, sized, turns=True)
            for _ in range(args.repeats):
                load = os.getloadavg()[0]
                results.add({**measure(cell, args.window), "load_at_start": round(load, 2)})


def _baselines(
    found: dict[str, Any], times: DeviceTimes, batch: Batch, args: argparse.Namespace
) -> None:
    """Generation alone and colocated training, each once for all runs."""
    if str(times.slots) not in found["alone"]:
        found["alone"][str(times.slots)] = asyncio.run(generation_rate(times, args.window))
    for count in args.workers:
        key = colocated_key(count, times.slots, batch.groups)
        if key not in found["colocated"]:
            rate = colocated_rate(times, 2 * count, batch, COLOCATED_STEPS)
            found["colocated"][key] = asyncio.run(rate)


if __name__ == "__main__":
    main()
