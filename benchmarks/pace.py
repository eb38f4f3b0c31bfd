"""Pace of a small run against another checkout: samples/s and CPU seconds, in alternating pairs.

    python -m benchmarks.pace --against CHECKOUT [--pairs 7] [--steps 120]
    python -m benchmarks.pace        what the leader spends on being seen: archive, sinks and REST

Each run is digit sort at 0.1M parameters with one controller, one policy replica and one rollout
worker, in one checkout and then in the other, on the same cores: the machine's noise meets both.
The other checkout needs a ``.venv``, and takes this one's checkpoint. Ratios are this / other.
"""

import json
import os
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.runs import DEMO, ONE_OF_EACH, REPOSITORY, machine, options, write

# The other checkout may have other defaults.
OVERRIDES = {"model.path": str(DEMO / "model-0.1M"), **ONE_OF_EACH}
UNSEEN = {"archive.enabled": False, "metrics.sinks": [], "rest.enabled": False}
PROGRAM = """
import json, sys
from benchmarks.runs import run_fleet
fleet = run_fleet("pace", json.loads(sys.argv[1]), warm_up=int(sys.argv[2]))
print(json.dumps({
    "samples_per_s": fleet.samples_per_s,
    "step_s": fleet.step_s,
    "cpu_s_per_step": dict(fleet.cpu_s_per_step),
    "reward_last10": sum(fleet.rewards[-10:]) / 10,
    "times": {name: value for name, value in fleet.means.items() if name.startswith("time_")},
    "dropped": fleet.summary.get("groups_dropped", fleet.summary.get("dropped_groups")),
}))
"""


def main() -> None:
    parser = options("pace", __doc__, "pace")
    without = "root of another checkout; default: this one, without archive, sinks and REST"
    parser.add_argument("--against", type=Path, help=without)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warm-up", type=int, default=20, help="steps that are not counted")
    args = parser.parse_args()
    overrides = OVERRIDES | {"train.steps": args.steps}
    roots = {"other": (args.against or REPOSITORY).resolve(), "this": REPOSITORY}
    settings = {"other": overrides if args.against else overrides | UNSEEN, "this": overrides}
    pairs = []
    for number in range(args.pairs):
        # The order alternates, so that neither always runs on the warmer machine.
        order = list(roots) if number % 2 == 0 else list(reversed(roots))
        pair = {name: run(roots[name], settings[name], args.warm_up) for name in order}
        pairs.append(pair)
        ratio = pair["this"]["samples_per_s"] / pair["other"]["samples_per_s"]
        rates = ", ".join(f"{name} {pair[name]['samples_per_s']:,.0f}/s" for name in roots)
        print(f"pair {number + 1} of {args.pairs}: {rates}, x {ratio:.2f}", flush=True)
    found = {"machine": machine(), "steps": args.steps, "pairs": pairs, "ratios": ratios(pairs)}
    write(args.out, found)
    for name, values in found["ratios"].items():
        print(f"{name}: x {median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


def run(root: Path, overrides: dict[str, Any], warm_up: int) -> dict[str, Any]:
    """One run of a checkout, by that checkout's own code."""
    command = [str(root / ".venv/bin/python"), "-c", PROGRAM, json.dumps(overrides), str(warm_up)]
    load = os.getloadavg()[0]
    done = subprocess.run(
        command,
        cwd=root,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    if done.returncode:
        raise SystemExit(f"the run of {root} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "load_average": load}


def ratios(pairs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Ratios this / other of each pair, for the rate and for the CPU seconds of each role that all
    runs have: a checkout may have other roles."""
    found = {
        "samples_per_s": [p["this"]["samples_per_s"] / p["other"]["samples_per_s"] for p in pairs]
    }
    roles = set.intersection(*(set(run["cpu_s_per_step"]) for p in pairs for run in p.values()))
    for role in sorted(roles):
        used = [[p[name]["cpu_s_per_step"][role] for name in ("this", "other")] for p in pairs]
        if all(other > 0 for _, other in used):
            found[f"cpu_s_per_step.{role}"] = [this / other for this, other in used]
    return found


if __name__ == "__main__":
    main()
