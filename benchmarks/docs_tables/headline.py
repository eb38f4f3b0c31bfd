"""Headline figures of the README."""

from __future__ import annotations

import textwrap

from benchmarks.docs_tables.results import gain, results


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
        f"Asynchronous against its own synchronous mode: {gain(overlapped['waiting']['modes']):.1f} × with a reward "
        "that waits (log-normal, median 0.1 s; both train every group that they generate), "
        f"{gain(overlapped['as_is']['modes']):.1f} × without waiting.",
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
