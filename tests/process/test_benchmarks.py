"""Benchmarks that drive controllers from outside still get in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_control_plane_is_measured(tmp_path: Path) -> None:
    """A short row, as a process: tests import no benchmarks."""
    out = tmp_path / "row.json"
    short = ["--clients", "1", "--payloads", "16x16", "--seconds", "0.5", "--warm-up", "0.5"]
    command = [sys.executable, "-m", "benchmarks.control_plane", *short, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["payload"], row["clients"]) == ("16x16", 1)


def test_reading_of_payloads_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "fetch.json"
    short = [
        "--replicas",
        "2",
        "--groups",
        "2",
        "--completions",
        "2",
        "--tokens",
        "64",
        "--rounds",
        "1",
    ]
    command = [sys.executable, "-m", "benchmarks.scale", "fetch", *short, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(out.read_text())["median_s"]) == {"raw", "fetch", "checked"}
