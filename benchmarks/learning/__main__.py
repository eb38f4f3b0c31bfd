"""Learning on the digit-sort demo: held-out accuracy by algorithm, flow and staleness; and what it
takes to have all models of PPO on one device.

    python -m benchmarks.learning ppo                PPO with a critic against GRPO
    python -m benchmarks.learning lora               adapters against the whole model
    python -m benchmarks.learning flows              fine-tuning and preference flows, reward models
    python -m benchmarks.learning reward_model_rl    RL on a learned reward, with and without KL
    python -m benchmarks.learning distillation       reverse KL to a teacher over the steps of a run
    python -m benchmarks.learning staleness          asynchronous RL if longer answers take longer
    python -m benchmarks.learning lag                corrections of samples that are four steps old
    python -m benchmarks.learning all_models         PPO with a reward model, in turns and not

Each arm is a run of ``paceline up`` with one policy replica and one rollout worker; arms.toml has
the settings. Accuracy is greedy, on prompts that nothing is trained on, and the mean of a run's
last three evaluations or checkpoints: single ones swing by 0.05 to 0.10. Rows are added to
benchmarks/results/MEASUREMENT.json as they come; one that is measured again replaces the old one.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.learning import pairs
from examples.digit_sort.make_data import draw_distinct
from examples.rlhf.preferences import of_the_demo, write_rows
from paceline.observe.held_out import HeldOut
from policy_worker.checkpoint.export import export
from testbed.tiny_model import make_tiny_model, make_tiny_reward_model

MEASUREMENTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("arms.toml").read_text())
LAST = 3
"""Evaluations or checkpoints whose mean is a run's number."""
THIRDS = {"short": range(4, 7), "middle": range(7, 10), "long": range(10, 13)}
"""Digits of a prompt."""


class Measurement:
    """One learning measurement: settings of a run beside its arm's, and the fields of its row."""

    def __init__(self, table: Mapping[str, Any], results: runs.Results) -> None:
        self.table, self.results = table, results

    def settings(self, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return {}

    def row(self, fleet: runs.Fleet, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        raise NotImplementedError

    def about(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Facts of all rows together."""
        return {}


class HeldOutCurves(Measurement):
    def row(self, fleet: runs.Fleet, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        curve = [row["eval_reward_mean"] for row in runs.metrics(fleet.run_dir, "eval")]
        return {
            "curve": curve,
            "held_out": statistics.fmean(curve[-LAST:]),
            "explained_variance": fleet.means.get("explained_variance"),
            "staleness_mean": fleet.means["staleness_mean"],
        }

    def about(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        arms, name = self.table["arms"], self.table["arm_field"]
        by_arm = {arm: [row for row in rows if row[name] == arm] for arm in arms}
        means = {
            arm: statistics.fmean(row["held_out"] for row in found)
            for arm, found in by_arm.items()
            if found
        }
        return {"samples": 25_600, "mean": means}


class Flows(Measurement):
    """Training flows; preference data are recorded pairs of the model's own samples."""

    def __init__(self, table: Mapping[str, Any], results: runs.Results) -> None:
        super().__init__(table, results)
        self.prompts = pairs.unseen()
        if "before" not in results.data:
            before = pairs.accuracy(runs.model_of("0.1M"), self.prompts)
            results.data |= {"held_out": pairs.HELD_OUT, "before": before}

    def settings(self, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        found = runs.dotted(self.table["data"][arm["data"]])
        if arm["data"] != "sampled":
            name = "labels.jsonl" if arm["data"] == "labels" else "pairs.jsonl"
            found["data.path"] = str(self.recorded(arm, seed) / name)
        return found

    def recorded(self, arm: Mapping[str, Any], seed: int) -> Path:
        large = arm["data"] == "reward_pairs"
        return pairs.recorded(seed, pairs.REWARD_PAIRS if large else pairs.PAIRS)

    def row(self, fleet: runs.Fleet, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        steps = runs.metrics(fleet.run_dir, "step")[-10:]
        found: dict[str, Any] = {
            f"train_{name}": statistics.fmean(values)
            for name in ("pair_accuracy", "chosen_logprob_shift", "reward_margin")
            if (values := column(steps, name))
        }
        if arm["data"] == "reward_pairs":
            model, data = Path(fleet.summary["export"]), self.recorded(arm, seed)
            return found | {"held_out_pair_accuracy": pairs.pair_accuracy(model, data)}
        links = (fleet.run_dir / "checkpoints").glob("step-*")
        newest = sorted(
            (link for link in links if link.name[5:].isdigit()), key=lambda p: int(p.name[5:])
        )[-LAST:]
        models = [export(p.resolve(), None, fleet.run_dir / "exports" / p.name) for p in newest]
        accuracies = [pairs.accuracy(model, self.prompts) for model in models]
        return found | {"accuracies": accuracies, "accuracy": statistics.fmean(accuracies)}


class RewardModelRl(Measurement):
    """RL whose only reward is the score of a reward model; the truth is the exact match."""

    def settings(self, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        scorer, about = pairs.reward_model(seed)
        self.results.data["held_out"] = pairs.HELD_OUT
        self.results.data.setdefault("reward_models", {})[str(seed)] = about
        prompts = write_rows(pairs.DATA / "unseen.jsonl", pairs.unseen())
        return {
            "scorers.preference.path": str(scorer),
            "evaluation.sets.truth.path": str(prompts),
        }

    def row(self, fleet: runs.Fleet, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        curve = curve_of(fleet.run_dir)
        truths = [point["truth"] for point in curve]
        best = max(curve, key=lambda point: float(point["truth"]))
        held_out, warned_at = HeldOut(), None
        for line in (fleet.run_dir / "events.jsonl").read_text().splitlines():
            event = json.loads(line)
            held_out.take(event["type"], event)
            if held_out.fallen and warned_at is None:
                warned_at = max(held_out.scores)
        return {
            "before": truths[0],
            "after": statistics.fmean(truths[-LAST:]),
            "best": best["truth"],
            "best_step": best["step"],
            "score_first": curve[1]["score"],
            "score_last": statistics.fmean(point["score"] for point in curve[-LAST:]),
            "kl_last": curve[-1]["kl"],
            "warned_at": warned_at,
            "curve": curve,
        }


def curve_of(run_dir: Path) -> list[dict[str, Any]]:
    """Each evaluation's true accuracy, and score and KL over the steps since the one before.

    An evaluation has no accuracy if too few of its prompts were answered with one version of the
    weights; it is left out.
    """
    steps, curve, before = runs.metrics(run_dir, "step"), [], 0
    for evaluation in runs.metrics(run_dir, "eval"):
        if (truth := evaluation.get("eval_truth/reward")) is None:
            continue
        between = [row for row in steps if before < row["step"] <= evaluation["step"]]
        before = evaluation["step"]
        score, kl = (
            statistics.fmean(values) if (values := column(between, name)) else None
            for name in ("reward_mean", "kl")
        )
        curve.append({"step": before, "truth": truth, "score": score, "kl": kl})
    return curve


def column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Values of a metric, from the rows that have it."""
    return [row[name] for row in rows if row.get(name) is not None]


class Distillation(Measurement):
    """Distillation from a teacher of the student's size that was trained for longer."""

    TEACHER_TARGET = 0.75
    """Exact match at which the training of the teacher stops."""
    WINDOW = 5
    """Steps whose mean counts, since the KL is estimated from samples."""

    def __init__(self, table: Mapping[str, Any], results: runs.Results) -> None:
        super().__init__(table, results)
        self.teacher = runs.SCRATCH / f"model-teacher-{self.TEACHER_TARGET}"
        if not (self.teacher / "tokenizer.json").is_file():
            command = [sys.executable, "-m", "examples.digit_sort.warm_start"]
            command += ["--target", str(self.TEACHER_TARGET), "--out", str(self.teacher)]
            subprocess.run(command, cwd=runs.REPOSITORY, check=True, stdout=subprocess.DEVNULL)
        results.data["teacher_exact_match"] = runs.exact_match(self.teacher)

    def settings(self, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        return {"scorers.teacher.path": str(self.teacher)}

    def row(self, fleet: runs.Fleet, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """``halved_at`` is the first step whose window has at most half the mean of the first."""
        kl = column(runs.metrics(fleet.run_dir, "step"), "teacher_kl")
        means = {
            step: statistics.fmean(kl[step - self.WINDOW : step])
            for step in range(self.WINDOW, len(kl) + 1)
        }
        first = means[self.WINDOW]
        halved = next((step for step, mean in means.items() if mean <= first / 2), None)
        return {"first": first, "last": means[len(kl)], "halved_at": halved, "teacher_kl": kl}


class Staleness(Measurement):
    """Digit sort with a reward that waits in proportion to the answer's length.

    A prompt with more digits is harder, and its answer longer. A third is a third of the lengths.
    """

    def __init__(self, table: Mapping[str, Any], results: runs.Results) -> None:
        super().__init__(table, results)
        self.prompts = draw_distinct(random.Random(2025), 1536, of_the_demo())
        results.data["before"] = self.accuracy(runs.model_of("0.1M"))

    def accuracy(self, model: Path) -> dict[str, float]:
        right = runs.right_answers(model, self.prompts)
        lengths = [len(row["answer"]) for row in self.prompts]
        thirds = {
            name: statistics.fmean(r for r, n in zip(right, lengths, strict=True) if n in digits)
            for name, digits in THIRDS.items()
        }
        return {"all": statistics.fmean(right), **thirds}

    def row(self, fleet: runs.Fleet, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        means = fleet.means
        return {
            "reward_last10": statistics.fmean(fleet.rewards[-10:]),
            "accuracy": self.accuracy(Path(fleet.summary["export"])),
            "groups_dropped": dict(fleet.summary["groups_dropped"]),
            "dropped": runs.dropped_share(fleet.summary),
            "response_tokens": means["response_tokens_mean"],
            **{name: means.get(name, 0.0) for name in ("late_share", "masked_share", "ess")},
            "staleness_mean": means["staleness_mean"],
            "staleness_max": fleet.summary["max_staleness"],
        }

    def about(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        modes = {}
        for mode in self.table["arms"]:
            if not (found := [row for row in rows if row["mode"] == mode]):
                continue
            numbers = [name for name, value in found[0].items() if isinstance(value, float)]
            parts = {p: [row["accuracy"][p] for row in found] for p in found[0]["accuracy"]}
            modes[mode] = {
                **{name: statistics.fmean(row[name] for row in found) for name in numbers},
                "accuracy": {
                    part: {"mean": statistics.fmean(each), "low": min(each), "high": max(each)}
                    for part, each in parts.items()
                },
            }
        seeds = len({row["seed"] for row in rows})
        return {"seeds": seeds, "prompts": len(self.prompts), "modes": modes}


class AllModels(Measurement):
    """PPO with critic, reference and reward model: memory, and what the switches take."""

    def settings(self, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        given = self.table["model"]
        path = runs.SCRATCH / "model-{hidden}x{layers}".format(**given)
        if not (path / "tokenizer.json").is_file():
            make_tiny_model(path, **given)
        scorer = make_tiny_reward_model(path.with_name(f"{path.name}-reward"), path, seed)
        return {"model.path": str(path), "scorers.reward.path": str(scorer)}

    def row(self, fleet: runs.Fleet, arm: Mapping[str, Any], seed: int) -> dict[str, Any]:
        memory = {name: size / (1 << 30) for name, size in fleet.memory.items()}
        over = memory["pair"] / max(memory["policy"], memory["rollout"])
        return {
            "memory_gib": memory,
            "pair_over_larger": over,
            "switches": switches(fleet.run_dir),
        }


SWITCH = re.compile(r" (park|unpark)ed ((?:\w+=\S+ ?)+)$", re.MULTILINE)


def switches(run_dir: Path) -> dict[str, dict[str, float]]:
    """Mean seconds of the parts of a switch by role, from the workers' logs, and their number. What
    comes before a worker first parks is its start."""
    found: dict[str, dict[str, float]] = {}
    for log in sorted((run_dir / "logs").glob("*-0.log")):
        seconds: dict[str, list[float]] = {}
        lines = SWITCH.findall(log.read_text())
        for what, fields in dropwhile(lambda line: line[0] == "unpark", lines):
            for name, value in (field.split("=", 1) for field in fields.split()):
                if name == "s" or name.endswith("_s"):
                    part = what if name == "s" else name.removesuffix("_s")
                    seconds.setdefault(part, []).append(float(value))
        if seconds:
            means = {part: statistics.fmean(each) for part, each in seconds.items()}
            found[log.name.partition("-")[0]] = {"count": len(seconds["park"]), **means}
    return found


KINDS: dict[str, Callable[[Mapping[str, Any], runs.Results], Measurement]] = {
    "ppo": HeldOutCurves,
    "lora": HeldOutCurves,
    "flows": Flows,
    "reward_model_rl": RewardModelRl,
    "distillation": Distillation,
    "staleness": Staleness,
    "lag": Staleness,
    "all_models": AllModels,
}


def main() -> None:
    parser = runs.options("learning", __doc__, "MEASUREMENT")
    parser.add_argument("measurement", choices=list(MEASUREMENTS))
    parser.add_argument("--arms", nargs="+", help="default: all of the measurement")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="in each run")
    parser.set_defaults(out=None)
    args = parser.parse_args()
    table = MEASUREMENTS[args.measurement]
    if unknown := set(args.arms or ()) - set(table["arms"]):
        parser.error(f"--arms: unknown {', '.join(unknown)}; known: {', '.join(table['arms'])}")
    out = args.out or runs.RESULTS / f"{args.measurement}.json"
    results = runs.Results(out, table["arm_field"], "seed")
    measurement = KINDS[args.measurement](table, results)
    for seed in args.seeds:
        for name in args.arms or table["arms"]:
            results.add(measure(args, measurement, name, seed), measurement.about)


def measure(
    args: argparse.Namespace, measurement: Measurement, name: str, seed: int
) -> dict[str, Any]:
    table = measurement.table
    arm = table["arms"][name]
    settings = {
        "run.seed": seed,
        **runs.dotted(table["settings"]),
        **measurement.settings(arm, seed),
        **runs.dotted({key: value for key, value in arm.items() if key != "data"}),
        **runs.given(args.set),
    }
    begun = time.perf_counter()
    run_name = f"{args.measurement}-{name}-{seed}"
    fleet = runs.run_fleet(run_name, settings, warm_up=table["warm_up"], timeout_s=1800.0)
    return {
        table["arm_field"]: name,
        "seed": seed,
        "seconds": time.perf_counter() - begun,
        "step_s": fleet.step_s,
        "samples_per_s": fleet.samples_per_s,
        "samples": fleet.summary["samples_trained"],
        "samples_lost": fleet.summary["samples_lost"],
        "ledger_ok": fleet.summary["ledger_ok"],
        **measurement.row(fleet, arm, seed),
    }


if __name__ == "__main__":
    main()
