"""Share of injected faults whose cause the ledger names, and what they cost: real processes on two hosts.

    python -m benchmarks.attribution --seed 1 --rounds 3
    python -m benchmarks.attribution --kinds "worker: SIGKILL" "host: lost"

Each round injects one fault of each kind, in an order that the seed decides, and waits until the fleet is whole
again. Every fault that the ledger then has is counted, also those that nobody has injected. Needs root, iproute2 and
util-linux.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.attribution.hosts import TwoHosts
from benchmarks.attribution.injections import KINDS, Expected, Scene
from benchmarks.attribution.verdict import attributed_share, rows
from controller.ledger.views.fault_report import fault_report
from testbed.faults import failpoints
from testbed.faults.memory_group import memory_group, name_of
from testbed.faults.network_namespaces import why_not

BAR = 0.95
WARM_UP_STEPS = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attribution",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps-between", type=int, default=20, help="steps of calm after each fault"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--out", type=Path, help="JSON; default: benchmarks/results/attribution.json"
    )
    args = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    with memory_group(name_of("attribution")) as group:
        if group is None:
            print("no control group with a limit of memory can be made: left out", file=sys.stderr)
            args.kinds = [kind for kind in args.kinds if kind != "worker: out of memory"]
        found = measure(args, group)
    print(
        runs.table(
            ["injected", "cause", "times", "right cause", "lost, s", "whole again, s"], rows(found)
        )
    )
    print(f"{found['share']:.1%} attributed; {found['report']}")
    print(runs.write("attribution", found, args.out))
    return 0 if found["share"] >= BAR else 1


def measure(args: argparse.Namespace, group: Path | None) -> dict[str, Any]:
    draw = random.Random(args.seed)
    order = [kind for _ in range(args.rounds) for kind in draw.sample(args.kinds, len(args.kinds))]
    found: dict[str, Any] = {"machine": runs.machine(), "seed": args.seed, "injections": []}
    with tempfile.TemporaryDirectory(prefix="paceline-attribution-") as name:
        os.environ.update(failpoints.environment(Path(name) / "armed"))
        began = time.time()
        fleet = TwoHosts(Path(name))
        try:
            fleet.steps(WARM_UP_STEPS)
            scene = Scene(fleet, draw, group)
            for kind in order:
                found["injections"].append(_injected(scene, kind, args.steps_between))
                print(found["injections"][-1], file=sys.stderr, flush=True)
                found |= _totals(fleet, found, time.time() - began)
                runs.write("attribution", found, args.out)
            fleet.assert_sound()
        finally:
            fleet.close()
    return found


def _injected(scene: Scene, kind: str, steps_between: int) -> dict[str, Any]:
    """What was injected, and every fault that the ledger has since, after ``steps_between`` more steps."""
    began = scene.since = time.time()
    expected = KINDS[kind](scene)
    noticed = scene.noticed(expected)
    scene.fleet.settled()
    whole_again_s = time.time() - began
    scene.fleet.steps(steps_between)
    faults = [fault for fault in scene.fleet.ledger().faults.recent if fault.t >= began]
    return {
        "kind": kind,
        "t": began,
        "whole_again_s": whole_again_s,
        "noticed": noticed,
        "expected": [_expected_row(one) for one in expected],
        "faults": [
            {
                "name": fault.name,
                "pid": fault.pid,
                "host": fault.host,
                "cause": str(fault.cause),
                "lost_s": fault.lost_s,
                "recovered_s": fault.recovered_s,
            }
            for fault in faults
        ],
    }


def _expected_row(one: Expected) -> dict[str, Any]:
    return {"name": one.name, "pid": one.pid, "cause": str(one.cause)}


def _totals(fleet: TwoHosts, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    report = fault_report(fleet.ledger().faults)
    return {
        "share": attributed_share(found["injections"]),
        "seconds": seconds,
        "lost_s": report.lost_s,
        "of_faults_s": sum(total.lost_s for total in report.causes.values()),
        "training_share": report.training_share,
        "report": report.sentence,
    }


if __name__ == "__main__":
    sys.exit(main())
