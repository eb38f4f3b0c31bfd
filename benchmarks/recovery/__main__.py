"""Benchmark of recovery: injects faults into a real fleet and measures detection and recovery.

    python -m benchmarks.recovery [--faults leader-kill policy-reduce] [--trials 20]
    python -m benchmarks.recovery --adapters --trials 3

The fleet has a tiny model and the default leases: Redis, 2 controllers, 2 policy replicas (or as
many as the fault needs) and 2 rollout workers, restarted by a supervisor. For faults of the
network, every process is started by hand in a network namespace of its own (needs root). Each trial
waits until the fleet is complete, injects one fault, and reads the journal. Times are the leader's
own, from the fault to the event that shows detection and to the event that shows recovery.
Results of faults that are not measured this time are kept; ``make docs`` writes their table. With
--adapters the fleets train adapters (LoRA), and workers fall; the results have a file of their own.
"""

import json
import math
import os
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.recovery import controllers, policies, redis_servers, rollouts
from benchmarks.recovery.case import Inject, Trial
from benchmarks.recovery.fleet_fixtures import FLEETS, GROUNDS, HOSTS
from testbed.faults.network_namespaces import why_not

TRIALS: dict[str, Inject] = {
    **controllers.TRIALS,
    **redis_servers.TRIALS,
    **policies.TRIALS,
    **rollouts.TRIALS,
}
WORKERS = policies.TRIALS | rollouts.TRIALS | {"power-cut": None}
"""What adapters may change."""
FAULTS = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
PRINTED = ("trials", "detect_median_s", "recover_median_s", "recover_p99_s", "repeated")
START_LIMIT_S = 180.0


def main() -> None:
    parser = runs.options("recovery", __doc__, "recovery")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--adapters", action="store_true", help="faults of workers alone")
    args = parser.parse_args()
    grounds = {name: FAULTS[name].get("ground", "usual") for name in args.faults}
    if args.adapters:
        args.out = args.out.with_stem("recovery_adapters")
        concerned = (n for n in args.faults if n in WORKERS and grounds[n] in FLEETS)
        grounds = {name: f"{grounds[name]}, adapters" for name in concerned}
    for ground in dict.fromkeys(grounds.values()):
        names = [name for name in grounds if grounds[name] == ground]
        if ground == HOSTS and (why := why_not()):
            print(f"left out: {', '.join(names)}: {why}", flush=True)
            continue
        measure_on(ground, names, args.trials, args.out)


def measure_on(ground: str, names: list[str], trials: int, out: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="paceline-recovery-") as where,
        GROUNDS[ground](Path(where)) as fleet,
    ):
        for name in names:
            found = []
            for _ in range(trials):
                fleet.settled(START_LIMIT_S)
                found.append(TRIALS[name](fleet))
            row = summarise(found)
            rows = json.loads(out.read_text()) if out.exists() else {}
            rows[name] = row
            runs.write(out, {n: rows[n] for n in FAULTS if n in rows})
            print(f"{name:<18} {json.dumps({k: row[k] for k in PRINTED})}", flush=True)
            fleet.assert_sound()
        fleet.settled(START_LIMIT_S)
        print(f"ledger: {json.dumps(fleet.assert_sound())}", flush=True)


def summarise(trials: list[Trial]) -> dict[str, Any]:
    detect = [t.detect_s for t in trials if t.detect_s is not None]
    joined = [t.joined_s for t in trials if t.joined_s is not None]
    repeated = sorted({t.repeated for t in trials}, key=_amount)
    return {
        "trials": len(trials),
        **_spread("detect", detect),
        **_spread("recover", [t.recover_s for t in trials]),
        **_spread("joined", joined),
        "repeated": repeated[0]
        if len(repeated) == 1
        else f"{_amount(repeated[0])} to {repeated[-1]}",
        "load_average": os.getloadavg()[0],
        "machine": runs.machine(),
    }


def _amount(repeated: str) -> int:
    first = repeated.partition(" ")[0]
    return int(first) if first.isdigit() else 0


def _spread(name: str, values: list[float]) -> dict[str, Any]:
    """Median and 99th percentile (the largest, for fewer than 100), and every value."""
    ranked = sorted(values)
    return {
        f"{name}_median_s": statistics.median(ranked) if ranked else None,
        f"{name}_p99_s": ranked[math.ceil(0.99 * len(ranked)) - 1] if ranked else None,
        f"{name}_s": values,
    }


if __name__ == "__main__":
    main()
