"""Command line of the simulator: fuzz the controller, or reproduce a seed.

--seeds 1000                      that many schedules
--seed 42 --verbose               one schedule, with every journal entry
--crash-points --seeds 200        1,000 crash-and-resume points: in each run every role once
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial

from testbed.simulator.crash_points import run_crash_points
from testbed.simulator.faults import run_schedule
from testbed.simulator.world import World


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m testbed.simulator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=1, help="number of schedules")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--verbose", action="store_true", help="print every journal entry")
    parser.add_argument(
        "--crash-points", action="store_true", help="kill each role once, and account for every row"
    )
    parser.add_argument(
        "--turns", action="store_true", help="schedules of workers that take turns at devices"
    )
    arguments = parser.parse_args()
    run: Callable[..., World] = partial(run_schedule, turns=float(arguments.turns))
    if arguments.crash_points:
        run = run_crash_points
    option = "--crash-points " if arguments.crash_points else "--turns " * arguments.turns
    began = time.monotonic()
    failed = 0
    totals: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        try:
            world = run(seed, trace=arguments.verbose)
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {error}")
            print(
                f"  again: python -m testbed.simulator {option}--seed {seed} --verbose",
                flush=True,
            )
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
