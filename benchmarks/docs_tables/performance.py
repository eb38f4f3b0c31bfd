"""Tables of throughput: samples, groups and tokens a second, and the time of a new leader."""

from __future__ import annotations

from statistics import median

from benchmarks.docs_tables.results import gain, results, table


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
    return f"{said}\n\nAsynchronous to synchronous: {gain(found['modes']):.2f}; perfect overlap of these halves: {ideal / found['serial']:.2f}."


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
    return f"{said}\n\nAsynchronous to synchronous: {gain(found):.1f}."


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
    for kind in ("", "_batched", "_quota"):
        found = results(f"control_plane_against{kind}")
        for payload, compared in found["against"].items():
            loads += [run["load_average"] for pair in compared["pairs"] for run in pair.values()]
            cells: list[object] = [
                payload.replace("x", " × "),
                found["machine"]["groups_a_submit"],
                found["machine"].get("leader_cores") or "none",
                len(compared["pairs"]),
            ]
            cores = [
                median(pair[which]["leader_cpu"] for pair in compared["pairs"])
                for which in ("other", "this")
            ]
            cells.append(f"{cores[0]:.2f} → {cores[1]:.2f}")
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
    head = [
        "payload",
        "groups a submission",
        "quota of the leader, cores",
        "pairs",
        "leader, cores",
    ]
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
