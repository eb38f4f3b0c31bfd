"""Results of the trials, and their table in docs/fault-tolerance.md."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.recovery.case import Case, Trial
from benchmarks.runs import machine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fault-tolerance.md"
BEGIN, END = "<!-- recovery table: begin -->", "<!-- recovery table: end -->"
HEAD = (
    "| fault | detected by | detected after, median / p99 (s) | recovered when | after, median"
    " / p99 (s) | work repeated | trials | what a user saw |",
    "|---|---|---|---|---|---|---|---|",
)


def summarise(trials: list[Trial]) -> dict[str, Any]:
    detect = [t.detect_s for t in trials if t.detect_s is not None]
    joined = [t.joined_s for t in trials if t.joined_s is not None]
    repeated = sorted({t.repeated for t in trials}, key=_amount)
    return {
        "trials": len(trials),
        **_of("detect", detect),
        **_of("recover", [t.recover_s for t in trials]),
        **_of("joined", joined),
        "repeated": repeated[0]
        if len(repeated) == 1
        else f"{_amount(repeated[0])} to {repeated[-1]}",
        "load_average": os.getloadavg()[0],
        "machine": machine(),
    }


def _amount(repeated: str) -> int:
    first = repeated.partition(" ")[0]
    return int(first) if first.isdigit() else 0


def _of(name: str, values: list[float]) -> dict[str, Any]:
    """Median and 99th percentile (the largest, for fewer than 100), and every value."""
    if not values:
        return {f"{name}_median_s": None, f"{name}_p99_s": None, f"{name}_s": []}
    ranked = sorted(values)
    return {
        f"{name}_median_s": statistics.median(ranked),
        f"{name}_p99_s": ranked[math.ceil(0.99 * len(ranked)) - 1],
        f"{name}_s": values,
    }


def store(out: Path, name: str, row: dict[str, Any], order: Mapping[str, Case]) -> None:
    rows = json.loads(out.read_text()) if out.exists() else {}
    rows[name] = row
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({n: rows[n] for n in order if n in rows}, indent=1) + "\n")


def lines(rows: Mapping[str, Any], cases: Mapping[str, Case]) -> list[str]:
    """Of the page, between its marks."""
    found = [*HEAD]
    for name, case in cases.items():
        if (row := rows.get(name)) is None:
            continue
        detect, recover = (_pair(row, which) for which in ("detect", "recover"))
        cells = (case.what, case.detected, detect, case.recovered, recover, row["repeated"])
        found.append(f"| {' | '.join(cells)} | {row['trials']} | {case.seen} |")
    for role, what in (
        ("polic", "policy replica: first vote"),
        ("rollout", "rollout worker: first lease"),
    ):
        joined = [s for n, row in rows.items() if n.startswith(role) for s in row["joined_s"]]
        if joined:
            one = _of("joined", joined)
            found += [
                "",
                f"Replacement {what} {one['joined_median_s']:.2f} s (median; p99 "
                f"{one['joined_p99_s']:.2f} s, {len(joined)} trials) after it registered "
                "with its model loaded.",
            ]
    return found


def _pair(row: Mapping[str, Any], which: str) -> str:
    median, p99 = row[f"{which}_median_s"], row[f"{which}_p99_s"]
    return "n/a" if median is None else f"{median:.2f} / {p99:.2f}"


def page(rows: Mapping[str, Any], cases: Mapping[str, Case]) -> str:
    """The page with the table of ``rows`` between its marks."""
    head, rest = PAGE.read_text().split(BEGIN)
    tail = rest.split(END)[1]
    return head + BEGIN + "\n" + "\n".join(lines(rows, cases)) + "\n" + END + tail
