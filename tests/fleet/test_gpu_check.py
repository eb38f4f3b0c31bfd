"""The GPU check on a machine without a GPU: every part runs, small, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.patience import patient

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.long
@pytest.mark.parametrize("with_fleet", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_part_runs_on_the_cpu_and_the_run_survives_both_kills(
    tmp_path: Path, with_fleet: bool
) -> None:
    """In every run its fleet is that of test_short_flows.py, whose workers are killed, too."""
    out = tmp_path / "found.json"
    words = ["--seconds", "900", "--out", out, *["--without-fleet"] * (not with_fleet)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *words],
        cwd=ROOT,
        env=HIDDEN,
        capture_output=True,
        text=True,
        timeout=patient(600),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU: a toy model on the CPU" in done.stdout
    found = json.loads(out.read_text())
    assert [row["type"] for row in found["parity"]] == ["float32", "bfloat16"] * 2
    assert len(found["architectures"]) > 15
    speeds = [row for part in found if part.startswith("trainer, ") for row in found[part]]
    assert len(speeds) > 2
    assert all(row["tokens/s"] > 0 for row in speeds)
    *adapted, adapters = found["LoRA, toy"]
    assert [row["tokens/s"] > 0 for row in adapted] == [True]
    assert found["publication"][0]["GB"] > 2 * adapters["GB"] > 0
    *turns, switch, _ = found["turns"]
    assert [row["role"] for row in turns] == ["trainer"] * 3 + ["transformers"] * 3
    assert switch["to training, s"] > 0 and switch["to generation, s"] > 0
    assert "a GPU: no speed of one" in found["lacks"]
    assert {"torch", "when"} <= set(found["machine"]) and "load_at_start" not in found["machine"]
    assert [row["ok"] for row in found["communicator"]] == [True, True]
    assert found["engines"][0]["tokens/s"] > 0
    assert all("left out" in row for row in found["engines"][1:])
    _, publishing, checkpoint = found["beside training"]
    assert publishing["first version sent in, s"] > 0 and checkpoint["GB"] > 0
    if not with_fleet:
        return
    (run,) = found["fleet"]
    assert (run["steps"], run["samples lost"], run["samples duplicated"]) == (12, 0, 0)
