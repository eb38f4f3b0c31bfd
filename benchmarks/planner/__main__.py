"""Errors of the capacity planner against published runs, row by row.

Each system is calibrated from its own synchronous rows, or from other systems' figures if it has
none; its asynchronous rows are then predicted. The bar: rows of systems with their parts measured
at two or more sizes have a median error of at most 12 %, each at most 25 %, and the sign of every
control is right.

    python -m benchmarks.planner
"""

import json
import statistics
from dataclasses import replace
from typing import Any

from benchmarks import runs
from benchmarks.planner.published import Asynchronous, PublishedSystem, published_systems
from testbed.planner.calibration import calibrated, from_published
from testbed.planner.pace import asynchronous, synchronous
from testbed.planner.system import StageTime, System


def main() -> None:
    parser = runs.options("planner", __doc__, "planner")
    parser.add_argument("--only", metavar="SYSTEM", help="one system with synchronous rows")
    args = parser.parse_args()
    found: dict[str, Any] = {"rows": [], "fitted": {}}
    systems: dict[str, list[System]] = {}
    for published in published_systems():
        if args.only not in (None, published.name):
            continue
        variants = systems[published.name] = _variants(published, systems)
        found["fitted"][published.name] = _fitted(published, variants)
        found["rows"] += [_compared(published, variants, row) for row in published.asynchronous]
    if args.only is None:
        found["bar"] = _bar(found["rows"])
        print(json.dumps(found["bar"], indent=2))
    runs.write(args.out, found)


def _variants(published: PublishedSystem, calibrations: dict[str, list[System]]) -> list[System]:
    if not published.rows:
        row = published.asynchronous[0]
        gpus = row.policy_gpus + row.rollout_gpus
        return from_published(published.bare, published.gpu.flops, gpus, published.active)
    variants = calibrated(published.bare, published.rows)
    if published.like is None:
        return variants
    (example,) = calibrations[published.like]
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
    after = asynchronous(
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
    return before.step_s / after.step_s


def _compared(
    published: PublishedSystem, variants: list[System], row: Asynchronous
) -> dict[str, Any]:
    ratios = [_ratio(system, row) for system in variants]
    low, high = min(ratios), max(ratios)
    return {
        "kind": published.kind,
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
    one_size = [row for row in rows if row["kind"] == "parts of a step at one size"]
    return {
        "rows": len(counted),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "signs_right": all(row["sign_right"] for row in (*counted, *controls)),
        "one_row_inside": all(row["inside"] for row in one_size),
    }


if __name__ == "__main__":
    main()
