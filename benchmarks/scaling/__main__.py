"""Throughput of fleets of 1 to 8 rollout workers against ideal.

    python -m benchmarks.scaling                                   every cell, about 20 minutes
    python -m benchmarks.scaling --workers 8 --staleness 2 5 --slots 32 --repeats 3

Controller, Redis, gRPC and all workers are those that ship. Decoding and training take the times of
emulated GPUs, so that the machine's cores are not the bound. A run with n rollout workers has a
trainer of n GPUs. Runs are added to those in the results. ``benchmarks.scaling.few_devices``
compares ways to use the same GPUs.
"""

import asyncio
import itertools
import os
from dataclasses import asdict, replace

from benchmarks import runs
from benchmarks.scaling.alone import Batch, generation_rate
from benchmarks.scaling.device_times import DeviceTimes
from benchmarks.scaling.fleet import Cell, measure

GROUP_SIZE = 4


def main() -> None:
    parser = runs.options("scaling", __doc__, "scaling")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--slots", type=int, nargs="+", default=[16], help="of one engine")
    parser.add_argument("--groups", type=int, nargs="+", default=[32], help="of a step")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each cell")
    parser.add_argument("--window", type=float, default=20.0, help="measured seconds of a run")
    args = parser.parse_args()
    times = DeviceTimes()
    results = runs.Results(args.out)
    found = results.data
    found |= {"times": asdict(times), "group_size": GROUP_SIZE}
    alone = found.setdefault("alone", {})
    for groups, slots in itertools.product(args.groups, args.slots):
        sized, batch = replace(times, slots=slots), Batch(groups, GROUP_SIZE)
        if str(slots) not in alone:
            alone[str(slots)] = asyncio.run(generation_rate(sized, args.window))
        for workers, staleness in itertools.product(args.workers, args.staleness):
            cell = Cell(workers, staleness, batch, replace(sized, policy_gpus=workers))
            for _ in range(args.repeats):
                load = os.getloadavg()[0]
                results.add({**measure(cell, args.window), "load_at_start": round(load, 2)})


if __name__ == "__main__":
    main()
