"""Tables of what a run learns: staleness, PPO, preference flows, reward hacking, distillation."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.docs_tables.results import results, table


def staleness() -> str:
    found = results("staleness")
    parts = ("all", "short", "middle", "long")
    rows: list[list[object]] = [
        ["before", *[f"{found['before'][part]:.3f}" for part in parts], *[""] * 4]
    ]
    for name, mode in found["modes"].items():
        shown = [mode["accuracy"][part] for part in parts]
        rows.append(
            [
                name,
                *[f"{a['mean']:.3f} ({a['low']:.3f} to {a['high']:.3f})" for a in shown],
                f"{mode['reward_last10']:.3f}",
                f"{mode['samples_per_s']:,.0f}",
                f"{mode['late_share']:.0%}",
                f"{mode['dropped']:.0%}",
            ]
        )
    head = ["accuracy", *parts, "training reward", "samples/s", "late groups", "dropped groups"]
    return f"{table(head, rows)}\n\n{_cost_of_dropping(found)}"


def _cost_of_dropping(found: dict[str, Any]) -> str:
    dropping, *others = (
        found["modes"][name] for name in ("dropping", "synchronous", "asynchronous")
    )
    shorter = [1 - dropping["response_tokens"] / mode["response_tokens"] for mode in others]
    higher = [dropping["reward_last10"] - mode["reward_last10"] for mode in others]
    rates: dict[str, list[float]] = {}
    for run in found["runs"]:
        rates.setdefault(run["mode"], []).append(run["samples_per_s"])
    spread = max(max(each) / min(each) - 1 for each in rates.values())
    return "\n".join(
        [
            f"Dropping leaves out {dropping['dropped']:.0%} of the groups, all of them slow. Against the other modes, what it trains is",
            f"{min(shorter):.1%} to {max(shorter):.1%} shorter (`response_tokens_mean`), and its training reward reads "
            f"{min(higher):.3f} to {max(higher):.3f} higher.",
            f"The rates of one mode differ between seeds by up to {spread:.0%}.",
        ]
    )


def ppo() -> str:
    found = results("ppo")
    rows = []
    for name in found["mean"]:
        runs = sorted((r for r in found["runs"] if r["algorithm"] == name), key=lambda r: r["seed"])
        explained = [r["explained_variance"] for r in runs if r["explained_variance"] is not None]
        rows.append(
            [
                f"`{name}`",
                f"{found['mean'][name]:.3f}",
                " ".join(f"{r['held_out']:.3f}" for r in runs),
                f"{statistics.fmean(explained):.2f}" if explained else "",
                f"{statistics.fmean(r['staleness_mean'] for r in runs):.1f}",
            ]
        )
    before = found["runs"][0]["curve"][0]
    head = ["run", "held-out", "by seed", "explained variance", "staleness"]
    return (
        f"{table(head, rows)}\n\nBefore training: {before:.3f}. {found['samples']:,} samples each."
    )


def flows() -> str:
    """Of each flow the mean over its seeds; one without any is left out."""
    found = results("flows")
    by_flow: dict[str, list[dict[str, Any]]] = {}
    for run in found["runs"]:
        by_flow.setdefault(run["flow"], []).append(run)
    rows: list[list[object]] = [["before", f"{found['before']:.3f}", "", "", "", ""]]
    for flow, runs in by_flow.items():
        reward_model = "held_out_pair_accuracy" in runs[0]
        name = "held_out_pair_accuracy" if reward_model else "accuracy"
        each = [run[name] for run in runs]
        mean = f"{sum(each) / len(each):.3f}"
        shifts = [s for run in runs if (s := run.get("train_chosen_logprob_shift")) is not None]
        rows.append(
            [
                f"`{flow}`",
                "" if reward_model else mean,
                mean if reward_model else "",
                ", ".join(f"{x:.3f}" for x in each),
                f"{sum(shifts) / len(shifts):+.2f}" if shifts else "",
                f"{sum(run['samples'] for run in runs) / len(runs):,.0f}",
            ]
        )
    head = ["flow", "accuracy", "accuracy over pairs", "each seed", "chosen shift", "completions"]
    return table(head, rows)


def reward_hacking() -> str:
    """Of each run the means over its seeds."""
    found = results("reward_model_rl")
    names = {
        "grpo_kl": "GRPO, `kl_coef = 0.3`",
        "grpo": "GRPO without KL",
        "ppo_kl": "PPO, `kl_coef = 0.3`",
        "ppo": "PPO without KL",
    }
    rows = []
    for arm, name in names.items():
        of_arm = [run for run in found["runs"] if run["arm"] == arm]
        if not of_arm:
            continue
        seeds = sorted(of_arm, key=lambda run: run["seed"])
        warned = [str(run["warned_at"] or "no") for run in seeds]
        rows.append(
            [
                name,
                f"{statistics.fmean(run['before'] for run in seeds):.3f}",
                f"{statistics.fmean(run['best'] for run in seeds):.3f}",
                f"{statistics.fmean(run['after'] for run in seeds):.3f}",
                ", ".join(f"{run['after']:.3f}" for run in seeds),
                f"{statistics.fmean(run['score_first'] for run in seeds):.2f} → "
                f"{statistics.fmean(run['score_last'] for run in seeds):.2f}",
                ", ".join(warned),
            ]
        )
    head = ["run", "truth before", "highest", "at the end", "each seed", "score", "warned at step"]
    pairs = ", ".join(f"{one['pair_accuracy']:.3f}" for one in found["reward_models"].values())
    steps = {run["arm"]: run["curve"][-1]["step"] for run in found["runs"]}
    length = ", ".join(f"{names[arm].split(',')[0].split(' ')[0]} {n}" for arm, n in steps.items())
    lengths = ", ".join(dict.fromkeys(length.split(", ")))
    return (
        f"{table(head, rows)}\n\nAccuracy of the reward models over held-out pairs, by seed: {pairs}. "
        f"Steps: {lengths}; {found['runs'][0]['samples']:,} completions each."
    )


def distillation() -> str:
    found = results("distillation")
    rows = [
        [
            run["seed"],
            f"{run['first']:.3f}",
            f"{run['last']:.3f}",
            f"{run['last'] / run['first']:.2f}",
            run["halved_at"] or "not",
        ]
        for run in sorted(found["runs"], key=lambda run: run["seed"])
    ]
    head = ["seed", "KL of the first five steps", "of the last five", "ratio", "halved at step"]
    steps = len(found["runs"][0]["teacher_kl"])
    return (
        f"{table(head, rows)}\n\nExact match of the teacher: {found['teacher_exact_match']:.3f}. "
        f"{steps} steps, {found['runs'][0]['samples']:,} completions each."
    )
