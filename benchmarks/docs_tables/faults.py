"""Tables of faults: chaos, the simulator, attribution, and limits of the pace."""

from __future__ import annotations

from benchmarks.attribution import verdict as attribution_verdict
from benchmarks.docs_tables.results import results, table


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
        f"({found['known'] / faults:.1%}) have a known cause. {found['share']:.1%} have the cause that was injected; a fault "
        f"that was not injected counts as wrong. A fault cost {of_causes / faults:.1f} s on average. "
        f"{found['training_share']:.0%} of the time was spent training; of the {found['lost_s']:.0f} s that commits were late, "
        f"{of_causes:.0f} s were while a fault was not over. "
        f"The load average was {found['machine']['load_at_start']:.1f} at the start."
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
    return table(["reported limit", "change", "steps/s before", "after", "times"], rows)
