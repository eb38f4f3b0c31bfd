"""Benchmarks that drive controllers from outside still get in."""

import json
import os
import subprocess
import sys
from pathlib import Path

from testbed.patience import patient

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = dict(os.environ)
"""As it is before any test: vLLM leaves torchrun's variables in the process that it ran in."""


def test_the_control_plane_is_measured(tmp_path: Path) -> None:
    """A short row, as a process: tests import no benchmarks."""
    out = tmp_path / "row.json"
    short = ["--clients", "1", "--payloads", "16x16", "--seconds", "0.5", "--warm-up", "0.5"]
    command = [sys.executable, "-m", "benchmarks.control_plane", *short, "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=patient(120)
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["payload"], row["clients"]) == ("16x16", 1)


def test_the_planner_is_compared_with_a_published_run(tmp_path: Path) -> None:
    out = tmp_path / "planner.json"
    command = [sys.executable, "-m", "benchmarks.planner", "--only", "DORA 32B", "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=patient(240)
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows] == ["DORA 32B"] * 2
    assert all(abs(row["error"]) <= 0.25 and row["sign_right"] for row in rows)


def test_the_planner_meets_its_bar_in_the_results_of_its_page() -> None:
    bar = json.loads((ROOT / "benchmarks/results/planner.json").read_text())["bar"]
    assert bar["median_error"] <= 0.12
    assert bar["worst_error"] <= 0.25
    assert bar["signs_right"]
    assert bar["one_row_inside"]
