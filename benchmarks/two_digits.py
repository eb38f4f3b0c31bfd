"""Learning curve and time of the agent of ``examples/environments/two_digits.py``.

    python -m benchmarks.two_digits [--seeds 3]

Runs are those of ``python -m examples.environments.two_digits``: a random model of 0.1 M
parameters, one controller, one policy replica and one rollout worker. Rows have the rewards of
training and of held-out samples (greedy), and the seconds of a run with its start and its export. A
repeated row replaces the old one.
"""

from typing import Any

from benchmarks import runs
from examples.environments.guess_digit import HERE, MADE, make


def main() -> None:
    parser = runs.options("two_digits", __doc__, "two_digits")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    results = runs.Results(args.out, "seed")
    make(MADE)
    for seed in range(args.seeds):
        results.add({"seed": seed, **learned(seed)})


def learned(seed: int) -> dict[str, Any]:
    config = HERE / "two_digits.toml"
    fleet = runs.run_fleet("two-digits", {"run.seed": seed}, warm_up=5, config=config)
    return {
        "steps": fleet.steps,
        "seconds": fleet.summary["wall_s"],
        "step_s": fleet.step_s,
        "samples_lost": fleet.summary["samples_lost"],
        "sequences_per_sample": fleet.means["sequences_per_sample"],
        "first5": fleet.summary["reward_first5"],
        "last5": fleet.summary["reward_last5"],
        "held_out": [row["eval_reward_mean"] for row in runs.metrics(fleet.run_dir, "eval")],
    }


if __name__ == "__main__":
    main()
