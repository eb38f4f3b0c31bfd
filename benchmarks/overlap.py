"""Gain from asynchrony: the same processes at ``max_staleness`` 0 (synchronous) and 4.

    python -m benchmarks.overlap

(a) As is: the demo's step, one policy replica and one rollout worker of one thread each. The
    learning rate is nearly 0, so that every mode does the same work at every step.
(b) With a reward that waits (log-normal, ``rewards.by_chance``), as a sandbox or a judge does, at
    the demo's learning rate: samples/s, and the reward after the same number of samples. The waits
    do not depend on what is answered; ``benchmarks.learning staleness`` has waits that do. Also
    with late groups dropped (train.late_groups = "drop"), for comparison.
"""

import statistics
from pathlib import Path
from typing import Any

from benchmarks import rewards, runs

SYNCHRONOUS, ASYNCHRONOUS = 0, 4
DROPPING = "4, late groups dropped"
COMMON: dict[str, Any] = {
    "model.path": str(runs.model_of("0.1M")),
    "data.eval_path": "none",
    "train.optimizer": {"schedule": "constant", "warmup_steps": 0},
    "train.checkpoint_every": 1000,
    "rollout.max_sequences": 256,
}


def main() -> None:
    parser = runs.options("overlap", __doc__, "overlap")
    parser.add_argument(
        "--parts", nargs="+", choices=["a", "b"], default=["a", "b"], help="others are kept"
    )
    args = parser.parse_args()
    result = runs.Results(args.out).data
    machine = result.pop("machine")
    if "a" in args.parts:
        result["as_is"] = {"machine": machine, **as_is()}
    if "b" in args.parts:
        result["waiting"] = {"machine": machine, **waiting()}
    runs.write(args.out, result)


def as_is() -> dict[str, Any]:
    settings = {**runs.dotted(COMMON), "train.optimizer.lr": 1e-9, "train.steps": 120}
    modes = {
        str(staleness): measure(f"overlap-a{staleness}", settings, staleness)
        for staleness in (SYNCHRONOUS, ASYNCHRONOUS)
    }
    return {"modes": modes}


def waiting() -> dict[str, Any]:
    settings = {
        **runs.dotted(COMMON),
        "train.steps": 60,
        "reward.functions": ["benchmarks.rewards:by_chance"],
        "reward.timeout_s": 120,
    }
    modes = {
        str(staleness): measure(f"overlap-b{staleness}", settings, staleness)
        for staleness in (SYNCHRONOUS, ASYNCHRONOUS)
    }
    drop = {**settings, "train.late_groups": "drop"}
    modes[DROPPING] = measure("overlap-b-drop", drop, ASYNCHRONOUS)
    return {"median_s": rewards.MEDIAN_S, "sigma": rewards.SIGMA, "modes": modes}


def measure(name: str, settings: dict[str, Any], staleness: int) -> dict[str, Any]:
    fleet = runs.run_fleet(name, {**settings, "train.max_staleness": staleness}, warm_up=10)
    print(f"{name}: {fleet.samples_per_s:.0f} samples/s", flush=True)
    return {
        "samples_per_s": fleet.samples_per_s,
        "step_s": fleet.step_s,
        "cpu_s_per_step": dict(fleet.cpu_s_per_step),
        "means": dict(fleet.means),
        "reward_first5": statistics.fmean(fleet.rewards[:5]),
        "reward_last10": statistics.fmean(fleet.rewards[-10:]),
        "held_out": runs.exact_match(Path(fleet.summary["export"])),
        "groups_dropped": fleet.summary["groups_dropped"],
        "dropped_share": runs.dropped_share(fleet.summary),
        "samples_lost": fleet.summary["samples_lost"],
    }


if __name__ == "__main__":
    main()
