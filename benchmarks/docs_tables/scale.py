"""Tables of fleets that grow."""

from __future__ import annotations

from benchmarks.docs_tables.results import results, table
from benchmarks.scale import FLEET_COLUMNS
from benchmarks.scaling import report as scaling_report


def scaling() -> str:
    found = results("scaling")
    alone = ", ".join(
        f"{rate:,.0f} tokens/s with {slots} slots" for slots, rate in found["alone"].items()
    )
    loads = [run["load_at_start"] for run in found["runs"]]
    return (
        f"{table(scaling_report.HEADER, scaling_report.rows(found))}\n\nOne engine alone: {alone}. If there are several runs, "
        f"the median is shown. The machine's 2 cores had other work: load averages of {min(loads):.1f} to {max(loads):.1f}."
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


def _short(value: float) -> str:
    """Two significant digits or more."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


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
