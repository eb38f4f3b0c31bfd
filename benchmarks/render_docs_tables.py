"""Tables of the documentation, rendered from the results of benchmarks.

    python -m benchmarks.render_docs_tables            writes them between their marks in docs/
    python -m benchmarks.render_docs_tables --check    exit status 1 if a page differs

``benchmarks.recovery --table`` and ``benchmarks.mutation`` write their own tables.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.attribution import verdict as attribution_verdict
from benchmarks.scale import FLEET_COLUMNS
from benchmarks.scaling import report as scaling_report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def peer() -> str:
    rows = []
    for size, found in results("peer")["sizes"].items():
        best = max(
            (n for n in found["samples_per_s"] if n.startswith("TRL")),
            key=found["samples_per_s"].get,
        )
        for name in (best, *found["ratios"]):
            held = found["runs"][name][0]["held_out"]
            ratio = f"{found['ratios'].get(name, 1.0):.2f}"
            held_out = f"{found['held_out_before']:.3f} → {held:.3f}"
            rows.append([size, name, f"{found['samples_per_s'][name]:,.0f}", held_out, ratio])
    return table(["model", "system", "samples/s", "held-out exact match", "ratio"], rows)


def overlap() -> str:
    found = results("overlap")["as_is"]
    ideal = found["ideal"]
    rows: list[list[object]] = [
        [f"{half}, alone on a core", f"{one['samples_per_s']:,.0f}", "", ""]
        for half, one in found["alone"].items()
    ]
    rows.append(
        [
            "one after the other, nothing else",
            f"{found['serial']:,.0f}",
            f"{found['serial'] / ideal:.2f}",
            "",
        ]
    )
    for staleness, mode in found["modes"].items():
        split = ", ".join(
            f"{part} {1e3 * mode['means'][f'time_{part}_s']:.0f}"
            for part in ("wait", "compute", "commit")
        )
        pace = mode["samples_per_s"]
        rows.append(
            [f"`max_staleness = {staleness}`", f"{pace:,.0f}", f"{pace / ideal:.2f}", split]
        )
    said = table(["", "samples/s", "of the ideal", "trainer, ms a step"], rows)
    return f"{said}\n\nAsynchronous to synchronous: {_gain(found['modes']):.2f}; perfect overlap of these halves: {ideal / found['serial']:.2f}."


def waiting() -> str:
    found = results("overlap")["waiting"]["modes"]
    rows = []
    for name, mode in found.items():
        staleness, *more = name.split(", ")
        rows.append(
            [
                ", ".join([f"`max_staleness = {staleness}`", *more]),
                f"{mode['samples_per_s']:,.0f}",
                f"{1e3 * mode['step_s']:,.0f}",
                f"{mode['held_out']:.3f}",
                f"{mode['means']['late_share']:.0%}",
                f"{mode['means']['masked_share']:.1%}",
                f"{mode['dropped_share']:.0%}",
            ]
        )
    head = ["", "samples/s", "ms a step", "held-out"]
    said = table([*head, "late groups", "masked tokens", "dropped groups"], rows)
    return f"{said}\n\nAsynchronous to synchronous: {_gain(found):.1f}."


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


def _gain(modes: dict[str, dict[str, Any]]) -> float:
    return float(modes["4"]["samples_per_s"] / modes["0"]["samples_per_s"])


def control_plane() -> str:
    found = results("control_plane")["rows"]
    rows = [
        [
            r["payload"].replace("x", " × "),
            r["clients"],
            f"{r['groups']:,}",
            f"{r['groups_per_s']:,.0f}",
            f"{r['tokens_per_s'] / 1e6:.2f} M",
            f"{r['p50_ms']:.1f}",
            f"{r['p99_ms']:.1f}",
            f"{r['rss_first_mb']:.0f} → {r['rss_mb']:.0f}",
        ]
        for r in found
    ]
    head = ["payload (completions × tokens)", "clients", "groups", "groups/s", "tokens/s"]
    return table([*head, "p50, ms", "p99, ms", "memory, MB"], rows)


def control_plane_against() -> str:
    rows, loads = [], []
    for which in ("", "_batched", "_processes"):
        found = results(f"control_plane_against{which}")
        for payload, compared in found["against"].items():
            loads += [run["load_average"] for pair in compared["pairs"] for run in pair.values()]
            cells: list[object] = [
                payload.replace("x", " × "),
                found["machine"]["groups_a_submit"],
                found["machine"]["load_processes"],
                len(compared["pairs"]),
            ]
            for measure in ("groups_per_cpu_s", "groups_per_s", "p99_ms"):
                before, now = (
                    median(pair[which][measure] for pair in compared["pairs"])
                    for which in ("other", "this")
                )
                ratios = compared["ratios"][measure]
                cells.append(
                    f"{before:,.0f} → {now:,.0f}, × {median(ratios):.2f} "
                    f"({min(ratios):.2f} to {max(ratios):.2f})"
                )
            rows.append(cells)
    head = ["payload", "groups a submission", "processes of clients", "pairs"]
    head += ["groups per second of the leader's CPU", "groups/s", "p99, ms"]
    lines = [table(head, rows), ""]
    lines.append(f"Load averages of 2 cores: {min(loads):.0f} to {max(loads):.0f}.")
    return "\n".join(lines)


def failover() -> str:
    rows = []
    for name, what in (
        ("failover", "noticed by the standbys"),
        ("failover_hint", "reported by the supervisor, which saw the process exit"),
    ):
        found = results(name)
        rows.append([what, found["trials"], f"{found['median_s']:.2f}", f"{found['max_s']:.2f}"])
    return table(["", "trials", "median, s", "maximum, s"], rows)


def mesh() -> str:
    found = results("mesh")
    rows: list[list[object]] = [
        [f"an epoch of {f['members']} members formed", f"{f['median']:.1f}", f"{f['max']:.1f}"]
        for f in found["form_ms"]
    ]
    rows += [
        [
            f"all-reduce of {r['MB']} MB, {r['members']} members",
            f"{r['median']:.1f}",
            f"{r['max']:.1f}",
        ]
        for r in found["reduce"]
        if r["MB"] == 32
    ]
    rows += [
        [
            f"one of three: {f['fault']} in the all-reduce, until the others' next sum",
            f"{f['summed_again']:.1f}",
            f"{f['summed_again_max']:.1f}",
        ]
        for f in found["fault_ms"]
    ]
    weights = [
        [f"{w['MB']} MB", f"{w['publish_ms']:.1f}", f"{w['transfer_ms']:.1f}"]
        for w in found["weights"]
        if w["receivers"] == 1
    ]
    first, last = found["leaks"][0], found["leaks"][-1]
    leak = (
        f"After {last['rebuilds']} rebuilds in one process: {last['threads'] - first['threads']} threads, "
        f"{last['descriptors'] - first['descriptors']} descriptors and {last['rss_MB'] - first['rss_MB']:.0f} MB more."
    )
    return "\n\n".join(
        [
            table(["", "median, ms", "maximum, ms"], rows),
            table(
                ["weights to one receiver", "taken from training, ms", "in the background, ms"],
                weights,
            ),
            leak,
        ]
    )


def model_load() -> str:
    rows = [
        [
            r["ranks"],
            {"whole": "the whole model on each rank", "slices": "slices"}[r["how"]],
            f"{r['shards_mib']:,.0f}",
            f"{r['peak_mib']:,.0f}",
            f"{r['peak_over_shards']:.2f}",
            f"{r['seconds']:.1f}",
        ]
        for r in results("model_load")["loads"]
    ]
    return table(["ranks", "reading", "shards, MiB", "peak, MiB", "peak / shards", "seconds"], rows)


def publishing_memory() -> str:
    ways = {
        "share": "a share on each rank",
        "share_deltas": "a share on each rank, and the one before for deltas",
        "whole": "all on rank 0",
    }
    rows = []
    for row in results("publishing_memory")["rows"]:
        most = max(row["by_rank"], key=lambda rank: rank["peak_mib"])
        beyond = (most["peak_mib"] - most["share_mib"]) / row["bucket_mib"]
        rows.append(
            [
                row["ranks"],
                ways[row["how"]],
                f"{most['slices_mib']:,.0f}",
                f"{most['share_mib']:,.0f}",
                f"{most['peak_mib']:,.0f}",
                f"{beyond:.1f}" if row["how"] == "share" else "",
                f"{row['seconds']:.1f}",
            ]
        )
    head = [
        "ranks",
        "kept",
        "slices of the rank with the highest peak, MiB",
        "kept of one version, MiB",
        "peak, MiB",
        "beyond its share, buckets",
        "seconds",
    ]
    size = sum(rank["share_mib"] for rank in row["by_rank"])
    return f"{table(head, rows)}\n\nThe model has {size:,.0f} MiB in bfloat16."


def reduction_overlap() -> str:
    rows = [
        [
            r["mbit"],
            f"{r['step_s']['backward']:.2f}",
            f"{r['exposed_s']['after']:.2f}",
            f"{max(0.0, r['exposed_s']['during']):.2f}",
            f"{r['hidden_share']:.0%}",
            f"{r['could_be_hidden']:.0%}",
        ]
        for r in results("reduction_overlap")["links"]
    ]
    head = [
        "link, Mbit/s",
        "row alone, s",
        "reduction after it, s",
        "during it, s",
        "hidden",
        "at most",
    ]
    return table(head, rows)


def engine() -> str:
    rows = [
        [model, way, f"{one['samples_per_s']:,.0f}", f"{one['ratio_samples']:.2f}"]
        for model, found in results("engine")["models"].items()
        for way, one in found["ways"].items()
    ]
    return table(["model", "", "samples per CPU second", "× `generate`"], rows)


def rollout() -> str:
    rows = [
        [model, of, f"{ratio['wall']:.2f}", f"{ratio['cpu']:.2f}"]
        for model, found in results("rollout")["models"].items()
        for of, ratio in found["ratios"].items()
    ]
    times = [
        [
            model,
            f"{found['process_start_to_first_token_s']:.1f}",
            f"{found['swap_pause_ms']:.0f}",
            f"{found['swap_stage_ms']:.0f}",
        ]
        for model, found in results("rollout")["models"].items()
    ]
    head = [
        "model",
        "process start to first token, s",
        "pause of a swap, ms",
        "staging beside it, ms",
    ]
    return f"{table(['model', 'of', 'wall time', 'CPU time'], rows)}\n\n{table(head, times)}"


def chaos() -> str:
    found = results("chaos")
    calm, wild = found["undisturbed"], found["chaos"]
    asked = ["500", "1000", "2000", str(wild["steps"])]
    lines: list[list[object]] = [
        ["steps", *(f"{r['steps']:,}" for r in (calm, wild))],
        ["samples trained; lost; trained twice", *(f"{r['samples_trained']:,}; {r['samples_lost']}; {r['samples_duplicated']}" for r in (calm, wild))],
        [f"held-out exact match after {', '.join(asked)} steps", *(", ".join(f"{r['held_out'][s]:.3f}" for s in asked) for r in (calm, wild))],
        ["new leaders; mesh rebuilds; rollbacks to a checkpoint", *(f"{r['controller_failovers']}; {r['mesh_rebuilds']}; {r['rollbacks']}" for r in (calm, wild))],
        ["samples/s", *(f"{r['samples_per_s']:.0f}" for r in (calm, wild))],
        ["wall time, s", *(f"{r['wall_s']:,.0f}" for r in (calm, wild))],
        ["longest time without a commit, s", *(f"{r['longest_without_commit_s']:.0f}" for r in (calm, wild))],
    ]  # fmt: skip
    votes = f"Digests of the replicas' weights were equal in all {found['votes_compared']:,} votes of the run with faults."
    head = ["", "undisturbed", f"{found['faults']} faults"]
    return f"{table(head, lines)}\n\n{votes}"


def simulator() -> str:
    found = results("simulator")
    kinds = ("entries", "events", "commits", "rollbacks", "deaths", "terms")
    counts = table(
        ["schedules", "failed", *kinds],
        [[f"{found[k]:,}" for k in ("schedules", "failed", *kinds)]],
    )
    return f"On commit {found['commit']}, `{found['command']}`:\n\n{counts}"


def headline() -> str:
    """The README's list."""
    sizes = results("peer")["sizes"]
    default, whole = (
        " and ".join(f"{found['ratios'][name]:.1f} × at {size}" for size, found in sizes.items())
        for name in ("Paceline", "Paceline, every sample computed")
    )
    overlapped = results("overlap")
    large = next(
        r
        for r in results("control_plane")["rows"]
        if (r["payload"], r["clients"]) == ("16x256", 64)
    )
    alone, told = results("failover"), results("failover_hint")
    step = results("recovery")["policy-idle"]
    aged = results("staleness")
    ours, synchronous = aged["modes"]["asynchronous"], aged["modes"]["synchronous"]
    points = (
        f"Samples per second against TRL's `GRPOTrainer`: {default} parameters; {whole} when samples of zero "
        "advantage, which TRL computes, are computed too.",
        f"Asynchronous against its own synchronous mode: {_gain(overlapped['waiting']['modes']):.1f} × with a reward "
        "that waits (log-normal, median 0.1 s; both train every group that they generate), "
        f"{_gain(overlapped['as_is']['modes']):.1f} × without waiting.",
        "The same with answers that take longer the longer they are: "
        f"{ours['samples_per_s'] / synchronous['samples_per_s']:.1f} ×, and after equal samples held-out accuracy on "
        f"the longest third is {ours['accuracy']['long']['mean']:.2f}, synchronous "
        f"{synchronous['accuracy']['long']['mean']:.2f} ({aged['seeds']} seeds, {ours['dropped']:.0%} of groups dropped).",
        f"The controller takes {large['groups_per_s']:,.0f} durable groups of 16 × 256 tokens per second from 64 "
        f"clients, 99 % of replies within {large['p99_ms']:.0f} ms, in {large['rss_mb']:.0f} MB.",
        f"A new leader answers {alone['median_s']:.1f} s after the old one was killed, {told['median_s']:.1f} s under "
        "`paceline up` (medians).",
        f"A step whose replica is killed is committed by the others {step['recover_median_s']:.1f} s later (median of "
        f"{step['trials']}).",
    )
    return "\n".join(
        textwrap.fill(point, 120, initial_indent="- ", subsequent_indent="  ") for point in points
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


def bottleneck() -> str:
    rows = [
        [
            limit,
            found["change"],
            f"{found['before']['steps_per_s']:.2f}",
            f"{found['after']['steps_per_s']:.2f}",
            f"{found['gain']:.1f}",
        ]
        for limit, found in results("bottleneck")["cases"].items()
        if found["before"]["bottleneck"] == limit
    ]
    return table(["limit, as told", "change", "steps/s before", "after", "times"], rows)


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


def weights() -> str:
    found = results("weights")
    rows = []
    for count in sorted({row["receivers"] for row in found["rows"]}):
        of = {row["wire"]: row for row in found["rows"] if row["receivers"] == count}
        rows.append([count, *(f"{of[wire]['transfer_ms']:.0f}" for wire in of)])
    deltas = next(row for row in found["rows"] if row["wire"] == "deltas")
    head = ["receivers", "float32, ms", "bfloat16, ms", "deltas, ms"]
    return (
        f"{table(head, rows)}\n\n{found['elements'] / 1e6:.0f} million weights. Bytes of the deltas: "
        f"{deltas['share_of_bf16']:.1%} of those of bfloat16, {deltas['worst_share_of_bf16']:.1%} in the worst step."
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


def scale_fleet() -> str:
    found = results("scale_fleet")
    head, rows = ["rollout workers, replicas"], []
    head += list(FLEET_COLUMNS.values())
    for before, after in zip(
        *(found[label]["operations"] for label in ("before", "after")), strict=True
    ):
        sizes = f"{after['rollouts']:,}, {after['policies']}"
        cells = [f"{_short(before[name])} → {_short(after[name])}" for name in FLEET_COLUMNS]
        rows.append([sizes, *cells])
    return table(head, rows)


def scale_snapshots() -> str:
    found = results("scale_fleet")
    before = {row["groups"]: row["pause_ms"] for row in found["before"]["snapshots"]}
    rows = [
        [
            f"{row['groups']:,}",
            f"{before[row['groups']]:,.0f}",
            f"{row['pause_cpu_ms']:.0f}",
            f"{row['pause_ms']:.0f}",
            f"{row['seconds']:.1f}",
            f"{row['bytes'] / 1e6:,.0f}",
        ]
        for row in found["after"]["snapshots"]
    ]
    head = ["uncovered groups", "pause before, ms", "pause, ms of CPU", "ms on the clock"]
    return table([*head, "written in, s", "MB"], rows)


def scale_meshes() -> str:
    found = results("scale_fleet")
    rows = [
        [after["members"], f"{before['commands']:,}", f"{after['commands']:,}"]
        for before, after in zip(
            *(found[label]["meshes"] for label in ("before", "after")), strict=True
        )
    ]
    return table(["members", "commands before", "commands"], rows)


def scaling() -> str:
    found = results("scaling")
    alone = ", ".join(
        f"{rate:,.0f} tokens/s with {slots} slots" for slots, rate in found["alone"].items()
    )
    loads = [run["load_at_start"] for run in found["runs"]]
    return (
        f"{table(scaling_report.HEADER, scaling_report.rows(found))}\n\nOne engine alone: {alone}. Where there are several runs, "
        f"the median is shown. The machine's 2 cores had other work: load averages of {min(loads):.1f} to {max(loads):.1f}."
    )


def attribution() -> str:
    found = results("attribution")
    head = [
        "injected",
        "cause",
        "times",
        "faults with that cause",
        "time lost, s",
        "whole again, s",
    ]
    faults, of_causes = found["faults"], found["of_faults_s"]
    return (
        f"{table(head, attribution_verdict.rows(found))}\n\n{len(found['injections'])} injections in "
        f"{found['seconds'] / 60:.0f} minutes, {faults} faults in the ledger. {found['known']} of them "
        f"({found['known'] / faults:.1%}) have a known cause. {found['share']:.1%} have the cause that was injected, where a fault "
        f"that nobody had injected counts as wrong. A fault cost {of_causes / faults:.1f} s on average. "
        f"{found['training_share']:.0%} of the time was spent training; of the {found['lost_s']:.0f} s that commits were late, "
        f"{of_causes:.0f} s were while a fault was not over. "
        f"The machine had other work: its load average was {found['machine']['load_at_start']:.1f} at the start."
    )


def weight_relays() -> str:
    found = results("weight_relays")
    rows = []
    for trainers, fanout in dict.fromkeys((r["trainers"], r["fanout"]) for r in found["rows"]):
        own = [r for r in found["rows"] if (r["trainers"], r["fanout"]) == (trainers, fanout)]
        alone = next(r["seconds"] for r in own if r["receivers"] == 1)
        last = max(own, key=lambda r: r["receivers"])
        rows.append(
            [
                trainers,
                fanout or "no relays",
                *(f"{r['seconds']:.2f}" for r in own),
                f"{last['seconds'] / alone:.2f}",
                f"{last['most_of_a_trainer']:.2f}",
                f"{last['trainer_copies']:.2f}",
            ]
        )
    counts = sorted({r["receivers"] for r in found["rows"]})
    head = ["replicas", "fanout", *(f"{n} receiver{'s' if n > 1 else ''}, s" for n in counts)]
    head += [f"{counts[-1]} / 1", f"copies from a replica at {counts[-1]}", "from all"]
    return (
        f"{table(head, rows)}\n\nEach process sends {found['egress_mb_s']:g} MB/s; a version has {found['mib']} MiB in "
        "bfloat16, sent whole. Copies: what the limit has counted, in versions."
    )


def weight_relays_hosts() -> str:
    found = results("weight_relays_hosts")
    of = {(row["fanout"], row["deltas"], row["receivers"]): row for row in found["rows"]}
    ways = list(dict.fromkeys((row["fanout"], row["deltas"]) for row in found["rows"]))
    head = ["receivers"]
    for fanout, deltas in ways:
        relays = f"fanout {fanout}" if fanout else "no relays"
        head.append(f"{relays}, {'deltas' if deltas else 'whole'}: s; copies")
    rows = []
    for count in sorted({row["receivers"] for row in found["rows"]}):
        cells = [of[*way, count] for way in ways]
        rows.append([count, *(f"{c['seconds']:.1f}; {c['trainer_copies']:.2f}" for c in cells)])
    return (
        f"{table(head, rows)}\n\nHosts send and receive {found['mbit'] / 8:g} MB/s; a version has {found['mib']} MiB in "
        "bfloat16. Copies: what the trainer's network device sent, in versions."
    )


def _short(value: float) -> str:
    """Two significant digits or more."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def payload_fetch() -> str:
    found = results("payload_fetch")
    names = {"raw": "plain GETs", "fetch": "as a replica reads", "checked": "with digests"}
    rows = [
        [
            names[way],
            ", ".join(f"{s:.1f}" for s in found["seconds"][way]),
            f"{found['median_s'][way]:.1f}",
            f"{found['median_s'][way] / found['median_s']['raw']:.2f}",
        ]
        for way in names
    ]
    return (
        f"{table(['way', 'rounds, s', 'median, s', 'of plain GETs'], rows)}\n\n{found['replicas']} replicas × "
        f"{found['groups']} groups of {found['payload'].replace('x', ' × ')} tokens, {found['gigabytes']:.1f} GB, on 2 cores "
        f"that the Redis server shares. The controller's largest resident size was {found['controller_peak_mb']:.0f} MB."
    )


def planner_errors() -> str:
    found = results("planner")
    rows = []
    for row in found["rows"]:
        if row["error"] is None:
            predicted = f"{row['low']:.2f} to {row['high']:.2f}"
            verdict = "inside" if row["inside"] else "**outside**"
        else:
            predicted, verdict = f"{row['low']:.2f}", f"{row['error']:+.0%}"
        if not row["sign_right"]:
            verdict += ", **wrong sign**" if row["error"] is not None else ", sign open"
        rows.append(
            [row["kind"], row["system"], row["row"], f"{row['published']:.2f}", predicted, verdict]
        )
    bar = found["bar"]
    head = ["evidence", "system", "asynchronous row", "published", "predicted", "error"]
    return (
        f"{table(head, rows)}\n\nOf the {bar['rows']} rows whose systems have their parts measured at two or more sizes, the "
        f"median error is {bar['median_error']:.1%} and the largest {bar['worst_error']:.0%}."
    )


def planner_fits() -> str:
    rows = []
    for system, fit in results("planner")["fitted"].items():
        variants = fit["variants"]
        for n, row in enumerate(fit["measured"]):
            said = [variant["synchronous_s"][n] for variant in variants]
            published = row["step_s"]
            if published is None:
                continue
            rows.append(
                [
                    system,
                    row["gpus"],
                    f"{variants[0]['token_ms']:.1f}",
                    f"{published:,.0f}",
                    f"{said[0]:,.0f}",
                    f"{said[0] / published - 1:+.0%}",
                ]
            )
    head = ["system", "GPUs", "ms a token", "synchronous step, s", "fitted, s", "error"]
    return table(head, rows)


def planner_parts() -> str:
    parts = results("planner")["parts"]
    head = list(parts[0])
    rows = [[row["row"], *(f"{row[name]:.2f}" for name in head[1:])] for row in parts]
    return table(head, rows)


def planner_assumed() -> str:
    rows = {(row["system"], row["source"], row["assumed"]) for row in results("planner")["rows"]}
    return table(["system", "source", "assumed, because it is not published"], sorted(rows))


PAGES = {
    "algorithms.md": (ppo, flows, reward_hacking, distillation),
    "diagnosis.md": (attribution, bottleneck),
    "asynchrony.md": (staleness,),
    "checkpoints.md": (model_load,),
    "trainer-memory.md": (publishing_memory,),
    "payloads.md": (payload_fetch,),
    "performance.md": (
        peer,
        overlap,
        waiting,
        control_plane,
        control_plane_against,
        failover,
        mesh,
        weights,
        reduction_overlap,
        engine,
    ),
    "vllm.md": (rollout,),
    "fault-tolerance.md": (chaos, simulator),
    "planner.md": (planner_errors, planner_parts, planner_fits, planner_assumed),
    "scale.md": (
        scaling,
        scale_fleet,
        scale_snapshots,
        scale_meshes,
        weight_relays,
        weight_relays_hosts,
    ),
    "../README.md": (headline,),
}


def current(page: str) -> str:
    """The text of ``page`` with its tables as the results say. Raises ValueError without a mark."""
    text = (DOCS / page).read_text()
    for made in PAGES[page]:
        name = made.__name__
        begin, end = f"<!-- {name} table: begin -->\n", f"<!-- {name} table: end -->"
        if begin not in text:
            raise ValueError(f"{page} has no mark for {name}")
        between = re.escape(begin) + ".*?" + re.escape(end)
        whole = begin + made() + "\n" + end
        text = re.sub(between, lambda _, whole=whole: whole, text, flags=re.DOTALL)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [page for page in PAGES if (DOCS / page).read_text() != current(page)]
    for page in stale:
        if not check:
            (DOCS / page).write_text(current(page))
        print(f"docs/{page}: {'not current' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
