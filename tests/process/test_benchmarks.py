"""Benchmarks that drive controllers from outside still get in, and those of fleets can begin."""

import json
import os
import subprocess
import sys
from pathlib import Path

from testbed.patience import patient

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = dict(os.environ)
"""As it is before any test: vLLM leaves torchrun's variables in the process that it ran in."""


def run(*words: str) -> None:
    """Python with these words, as a process: tests import no benchmarks."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        timeout=patient(240),
    )
    assert done.returncode == 0, done.stderr


def test_the_control_plane_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "row.json"
    short = ["--clients", "1", "--payloads", "16x16", "--seconds", "0.5", "--warm-up", "0.5"]
    run("-m", "benchmarks.control_plane", *short, "--out", str(out))
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["payload"], row["clients"]) == ("16x16", 1)


def test_the_planner_says_of_a_published_run_what_its_page_says(tmp_path: Path) -> None:
    out = tmp_path / "planner.json"
    run("-m", "benchmarks.planner", "--only", "DORA 32B", "--out", str(out))
    page = json.loads((ROOT / "benchmarks/results/planner.json").read_text())
    rows = [row for row in page["rows"] if row["system"] == "DORA 32B"]
    assert len(rows) == 2 and json.loads(out.read_text())["rows"] == rows
    bar = page["bar"]
    assert bar["median_error"] <= 0.12
    assert bar["worst_error"] <= 0.25
    assert bar["signs_right"]
    assert bar["one_row_inside"]


SCALING = """
import asyncio, sys
from pathlib import Path
from benchmarks.scaling.__main__ import Batch, Cell, DeviceTimes, generation_rate
from benchmarks.scaling.few_devices import arms, lending_arms
from benchmarks.scaling.fleet import _config
from paceline.config.load import load_config
cell = Cell(2, 1, Batch(2, 4), DeviceTimes(slots=4))
config = load_config(_config(cell, Path(sys.argv[1])))
assert (config.fleet.rollout, config.train.max_staleness) == (2, 1), config
lent = [arm for _, arm in lending_arms(4, cell.times)]
for arm in [*arms(4, cell.batch, cell.times), *lent]:
    load_config(_config(arm, Path(sys.argv[1])))
assert len(lent) == 6 and lent[0].fleet == {}, lent
assert asyncio.run(generation_rate(cell.times, 0.5)) > 0
"""
ATTRIBUTION = """
import json
from pathlib import Path
from benchmarks.attribution.__main__ import KINDS, attributed_share
found = json.loads(Path("benchmarks/results/attribution.json").read_text())
assert {one["kind"] for one in found["injections"]} == KINDS.keys()
assert attributed_share(found["injections"], found["other_faults"]) == found["share"]
"""


def test_benchmarks_of_whole_fleets_have_their_cases_and_measure_alike(tmp_path: Path) -> None:
    """The fleets themselves run for minutes: here a baseline is measured, and results are counted
    again."""
    run("-c", SCALING + ATTRIBUTION, str(tmp_path))
