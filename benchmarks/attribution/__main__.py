"""Attribution of injected faults, and their cost: real processes on two hosts.

    python -m benchmarks.attribution --seed 1 --rounds 3
    python -m benchmarks.attribution --kinds "worker: SIGKILL" "host: lost"
    python -m benchmarks.attribution --seed 2 --minutes 120 --calm-s 45

Each round injects one fault of each kind, in an order that the seed decides, and waits until the
fleet is whole again. Then comes a time of calm, whose length the seed decides too. Every fault that
the ledger then has is counted, also those that nobody has injected. Needs root, iproute2 and
util-linux.
"""

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import runs
from benchmarks.attribution.hosts import TwoHosts
from benchmarks.attribution.injections import KINDS, Expected, Scene
from benchmarks.attribution.verdict import attributed_share
from testbed.faults import failpoints
from testbed.faults.memory_group import memory_group, name_of
from testbed.faults.network_namespaces import why_not

BAR = 0.95
WARM_UP_STEPS = 10
LEDGER_S = 120.0
"""Longest absence of Redis while the fleet is calm."""


def main() -> int:
    parser = runs.options("attribution", __doc__, "attribution")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, help="rounds follow one another for so long, instead of --rounds"
    )
    parser.add_argument(
        "--calm-s", type=float, default=10.0, help="mean seconds of calm after each fault"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    with memory_group(name_of("attribution")) as group:
        if group is None:
            print("no control group with a limit of memory can be made: left out", file=sys.stderr)
            args.kinds = [kind for kind in args.kinds if kind != "worker: out of memory"]
        found = measure(args, group)
    print(f"{found['share']:.1%} attributed; {found['report']}")
    runs.write(args.out, found)
    if early := found.get("ended_early"):
        print(f"ended early: {early}")
    return 0 if found["share"] >= BAR and not early else 1


def measure(args: argparse.Namespace, group: Path | None) -> dict[str, Any]:
    """Results until the end; if that comes early, ``ended_early`` is the reason."""
    draw = random.Random(args.seed)
    found: dict[str, Any] = {"machine": runs.machine(), "seed": args.seed, "injections": []}
    with tempfile.TemporaryDirectory(prefix="paceline-attribution-") as name:
        os.environ.update(failpoints.environment(Path(name) / "armed"))
        signal.signal(signal.SIGTERM, _interrupt)
        fleet = TwoHosts(Path(name))
        try:
            fleet.steps(WARM_UP_STEPS, limit_s=300.0)
            began = time.time()
            scene = Scene(fleet, draw, group)
            for kind in _kinds(args, draw):
                calm_s = min(draw.expovariate(1.0 / args.calm_s), 3.0 * args.calm_s)
                try:
                    found["injections"].append(_injected(scene, kind, calm_s))
                except Exception as error:
                    # Of this program: what it had injected counts as faults that nobody has
                    # injected.
                    traceback.print_exc()
                    found.setdefault("problems", []).append(f"{kind}: {error!r}"[:500])
                    fleet.settled()
                    continue
                print(found["injections"][-1], file=sys.stderr, flush=True)
                found |= _totals(fleet, found, time.time() - began)
                print(f"{found['share']:.1%}; {found['report']}", file=sys.stderr, flush=True)
                runs.write(args.out, found)
            fleet.assert_sound()
        except (Exception, KeyboardInterrupt) as error:
            if not found["injections"]:
                raise
            traceback.print_exc()
            print(fleet.said(), file=sys.stderr, flush=True)
            found["ended_early"] = repr(error)[:2000]
        finally:
            fleet.close()
    return found


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def _kinds(args: argparse.Namespace, draw: random.Random) -> Iterator[str]:
    """One of each kind a round, in an order that chance decides."""
    end = None if args.minutes is None else time.monotonic() + 60.0 * args.minutes
    for _ in itertools.count() if end is not None else range(args.rounds):
        for kind in draw.sample(args.kinds, len(args.kinds)):
            if end is not None and time.monotonic() >= end:
                return
            yield kind


def _injected(scene: Scene, kind: str, calm_s: float) -> dict[str, Any]:
    """Row of an injection: what was expected, and every fault that the ledger has after a calm."""
    began = scene.since = time.time()
    expected, problem = _carried_out(scene, kind)
    noticed = scene.noticed(expected)
    scene.fleet.settled()
    whole_again_s = time.time() - began
    scene.fleet.calm(calm_s)
    recent = scene.fleet.faults(limit_s=LEDGER_S).recent
    faults = [fault for fault in recent if fault.t >= began]
    return {
        "kind": kind,
        **problem,
        "t": began,
        "whole_again_s": whole_again_s,
        "noticed": noticed,
        "expected": [_expected_row(fault) for fault in expected],
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


def _carried_out(scene: Scene, kind: str) -> tuple[list[Expected], dict[str, str]]:
    """Expected faults: none if this program fails halfway, so that all that follow are wrong."""
    try:
        return KINDS[kind](scene), {}
    except Exception as error:
        traceback.print_exc()
        return [], {"problem": repr(error)[:500]}


def _expected_row(one: Expected) -> dict[str, Any]:
    return {"name": one.name, "pid": one.pid, "cause": str(one.cause)}


def _totals(fleet: TwoHosts, found: dict[str, Any], seconds: float) -> dict[str, Any]:
    faults = fleet.faults(limit_s=LEDGER_S)
    injections = found["injections"]
    # Those of the start, or that came between two injections: nobody has injected them.
    others = faults.count - sum(len(one["faults"]) for one in injections)
    return {
        "share": attributed_share(injections, others),
        "faults": faults.count,
        "known": faults.attributed,
        "other_faults": others,
        "seconds": seconds,
        "lost_s": faults.lost_s,
        "of_faults_s": sum(faults.lost_by_cause.values()),
        "training_share": faults.training_share,
        "report": faults.sentence,
    }


if __name__ == "__main__":
    sys.exit(main())
