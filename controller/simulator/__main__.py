"""Command line of the simulator: fuzz the controller, reproduce a seed, or plan a fleet.

--seeds 1000                      that many schedules
--seed 42 --verbose               one schedule, with every journal entry
--plan policy=4 rollout=16 --step-s 2 --generate-s 10
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from dataclasses import fields

from controller.simulator.faults import run_schedule
from controller.simulator.plan import PlannedFleet, forecast, parse, show


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m controller.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of schedules")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument(
        "--verbose", action="store_true", default=False, help="print every journal entry"
    )
    parser.add_argument("--plan", nargs="+", metavar="ROLE=N", help="policy=N rollout=N slots=N")
    parser.add_argument("--step-s", type=float, help="one replica alone on a step, seconds")
    parser.add_argument("--generate-s", type=float, help="mean time of a group, seconds")
    parser.add_argument("--spread", type=float, help="sigma of its logarithm")
    parser.add_argument("--transfer-s", type=float, help="delay of messages and weights, seconds")
    parser.add_argument("--groups-per-step", type=int)
    parser.add_argument("--max-staleness", type=int)
    parser.add_argument("--steps", type=int)
    arguments = parser.parse_args()
    if "plan" not in arguments:
        return _fuzz(arguments)
    chosen = {
        f.name: getattr(arguments, f.name) for f in fields(PlannedFleet) if f.name in arguments
    }
    try:
        fleet = PlannedFleet(**parse(arguments.plan), **chosen)
    except ValueError as error:
        parser.error(str(error))
    print(show(fleet, forecast(fleet, arguments.seed)))
    return 0


def _fuzz(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    failed = 0
    totals: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            world = run_schedule(seed, trace=arguments.verbose)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}")
            print(f"  again: python -m controller.simulator --seed {seed} --verbose", flush=True)
            if arguments.verbose:
                traceback.print_exc()
            continue
        totals.update(world.oracle.counts)
    seconds = time.monotonic() - began
    print(
        f"{arguments.seeds} schedules, {failed} failed, {seconds:.1f} s; "
        + ", ".join(f"{n} {name}" for name, n in totals.items())
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
