"""Errors of the capacity planner against published runs, row by row.

Each system is calibrated from its own synchronous rows, or from other systems' figures if it has
none; its asynchronous rows are then predicted. The bar: rows of systems with their parts measured
at two or more sizes have a median error of at most 12 %, each at most 25 %, and the sign of every
control is right.

    python -m benchmarks.planner
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.planner.rows import KINDS, VERL_7B, Asynchronous, PublishedSystem
from testbed.planner.calibration import calibrated, from_published
from testbed.planner.pace import asynchronous, synchronous
from testbed.planner.system import StageTime, System


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--only", metavar="SYSTEM", help="one system with synchronous rows")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planner.json"))
    args = parser.parse_args(argv)
    found: dict[str, Any] = {"rows": [], "fitted": {}}
    systems: dict[str, list[System]] = {}
    for kind in KINDS:
        for published in kind.systems:
            if args.only not in (None, published.name):
                continue
            variants = _variants(published, systems)
            systems[published.name] = variants
            found["fitted"][published.name] = _fitted(published, variants)
            for row in published.asynchronous:
                found["rows"].append(_compared(kind.name, published, variants, row))
                print(json.dumps(found["rows"][-1]), flush=True)
    if args.only is None:
        found["parts"] = _parts(systems[VERL_7B.name][0])
        found["bar"] = _bar(found["rows"])
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found.get("bar"), indent=2))
    return 0


def _variants(published: PublishedSystem, known: dict[str, list[System]]) -> list[System]:
    bare = published.bare
    if not published.rows:
        row = published.asynchronous[0]
        gpus = row.policy_gpus + row.rollout_gpus
        return from_published(bare, published.gpu.flops, gpus, published.model.active)
    variants = calibrated(bare, published.rows)
    if published.like is None:
        return variants
    (example,) = known[published.like]
    (row_,) = published.rows
    return [
        replace(
            variants[0],
            update=_scaled(example.update, row_.gpus, row_.update_s),
            log_prob=_scaled(example.log_prob, row_.gpus, row_.log_prob_s),
        )
    ]


def _scaled(example: StageTime, gpus: int, seconds: float) -> StageTime:
    """``seconds`` at ``gpus``, with the scaling of ``example``."""
    return example.times(seconds / example.seconds(gpus))


def _ratio(system: System, row: Asynchronous) -> float:
    whole = asynchronous(
        system,
        row.policy_gpus,
        row.rollout_gpus,
        row.max_staleness,
        log_prob=row.asynchronous_log_prob,
        updates_per_version=row.updates_per_version,
    )
    if row.against_staleness is None:
        gpus = row.policy_gpus + row.rollout_gpus
        before = synchronous(system, gpus, log_prob=row.synchronous_log_prob)
    else:
        before = asynchronous(system, row.policy_gpus, row.rollout_gpus, row.against_staleness)
    return before.step_s / whole.step_s


def _parts(system: System) -> list[dict[str, Any]]:
    """Rows of verl 7B at staleness 0.5 as they are, and without one part of the model or of the
    comparison."""
    sizes = sorted(row.gpus for row in VERL_7B.rows)
    measured = {row.gpus: row for row in VERL_7B.rows}
    found = []
    for row in VERL_7B.asynchronous[: len(sizes)]:
        # All of an update is divided by the GPUs, as if nobody had measured more than one size.
        one = measured[row.policy_gpus + row.rollout_gpus]
        scaling = replace(
            system,
            update=StageTime.fit([(one.gpus, one.update_s)]),
            log_prob=StageTime.fit([(one.gpus, one.log_prob_s)]),
        )
        found.append(
            {
                "row": row.name,
                "published": row.published,
                "model": _ratio(system, row),
                "without constant": _ratio(scaling, row),
                "both recompute log-probs": _ratio(
                    system, replace(row, asynchronous_log_prob=True)
                ),
            }
        )
    return found


def _compared(
    kind: str, published: PublishedSystem, variants: list[System], row: Asynchronous
) -> dict[str, Any]:
    ratios = [_ratio(system, row) for system in variants]
    low, high = min(ratios), max(ratios)
    return {
        "kind": kind,
        "system": published.name,
        "source": published.source,
        "assumed": published.assumed,
        "row": row.name,
        "published": row.published,
        "low": low,
        "high": high,
        "control": row.control,
        "error": (low / row.published - 1) if len(ratios) == 1 else None,
        "inside": low <= row.published <= high if len(ratios) > 1 else None,
        "sign_right": all((ratio > 1) == (row.published > 1) for ratio in ratios),
    }


def _fitted(published: PublishedSystem, variants: list[System]) -> dict[str, Any]:
    return {
        "measured": [
            {"gpus": row.gpus, "generation_s": row.generation_s, "step_s": row.step_s}
            for row in published.rows
        ],
        "variants": [
            {
                "token_ms": 1e3 * system.engine.fixed,
                "update_gpu_s": system.update.gpu_seconds,
                "update_constant_s": system.update.constant,
                "log_prob_gpu_s": system.log_prob.gpu_seconds,
                "log_prob_constant_s": system.log_prob.constant,
                "synchronous_s": [
                    synchronous(system, row.gpus, log_prob=True).step_s for row in published.rows
                ],
            }
            for system in variants
        ],
    }


def _bar(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counted = [row for row in rows if row["kind"] == "parts of a step at two or more sizes"]
    errors = [abs(row["error"]) for row in counted]
    controls = [row for row in rows if row["control"]]
    one = [row for row in rows if row["kind"] == "parts of a step at one size"]
    return {
        "rows": len(counted),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "signs_right": all(row["sign_right"] for row in (*counted, *controls)),
        "one_row_inside": all(row["inside"] for row in one),
    }


if __name__ == "__main__":
    raise SystemExit(main())
