"""Tables of the documentation, rendered from the results of benchmarks.

    python -m benchmarks.docs_tables            writes them between their marks in docs/
    python -m benchmarks.docs_tables --check    exit status 1 if a page differs

``benchmarks.recovery --table`` and ``benchmarks.mutation`` write their own tables.
"""

from __future__ import annotations

import argparse
import re
import sys

from benchmarks.docs_tables import (
    faults,
    headline,
    learning,
    performance,
    planner,
    scale,
    weights,
)
from benchmarks.docs_tables.results import ROOT

DOCS = ROOT / "docs"

PAGES = {
    "algorithms.md": (learning.ppo, learning.flows, learning.reward_hacking, learning.distillation),
    "diagnosis.md": (faults.attribution, faults.bottleneck),
    "asynchrony.md": (learning.staleness,),
    "checkpoints.md": (weights.model_load,),
    "trainer-memory.md": (weights.publishing_memory,),
    "payloads.md": (weights.payload_fetch,),
    "performance.md": (
        performance.peer,
        performance.overlap,
        performance.waiting,
        performance.control_plane,
        performance.control_plane_against,
        performance.failover,
        weights.mesh,
        weights.weights,
        weights.reduction_overlap,
        performance.engine,
    ),
    "vllm.md": (performance.rollout,),
    "fault-tolerance.md": (faults.chaos, faults.simulator),
    "planner.md": (
        planner.planner_errors,
        planner.planner_parts,
        planner.planner_fits,
        planner.planner_assumed,
    ),
    "scale.md": (
        scale.scaling,
        scale.scale_fleet,
        scale.scale_snapshots,
        scale.scale_meshes,
        weights.weight_relays,
        weights.weight_relays_hosts,
    ),
    "../README.md": (headline.headline,),
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
