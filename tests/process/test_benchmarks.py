"""Benchmarks that drive controllers from outside still get in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.faults.network_namespaces import why_not
from testbed.patience import patient

ROOT = Path(__file__).resolve().parents[2]
WHY_NOT = why_not()
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


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_the_throughput_of_a_fleet_on_emulated_gpus_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    short = ["--workers", "1", "--staleness", "2", "--groups", "4", "--window", "2"]
    command = [sys.executable, "-m", "benchmarks.scaling", *short, "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=patient(280)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    (run,) = found["runs"]
    assert (run["rollouts"], run["max_staleness"]) == (1, 2)
    assert run["tokens_per_s"] > 0 and found["colocated"] and found["alone"]


# In every run: tests/unit/launch/test_evidence.py, test_memory_kill.py, test_why.py.
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_injected_faults_get_the_causes_that_were_injected(tmp_path: Path) -> None:
    """One of a worker, one of a process that has not registered, one of a controller."""
    out = tmp_path / "attribution.json"
    kinds = ["worker: error exit", "worker: SIGKILL, again before it registers", "leader: SIGKILL"]
    short = ["--rounds", "1", "--calm-s", "1", "--kinds", *kinds]
    command = [sys.executable, "-m", "benchmarks.attribution", *short, "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=patient(380)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert sorted(injection["kind"] for injection in found["injections"]) == sorted(kinds)
    assert found["share"] == 1.0


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
