"""What pip installs runs the demo, in a directory that has nothing of this repository."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from testbed.patience import patient
from tests.fixtures.wheel import python_with_our_wheel

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def test_an_installed_wheel_runs_the_demo_and_keeps_what_the_user_changed(tmp_path: Path) -> None:
    paceline = python_with_our_wheel(tmp_path / "installed").with_name("paceline")
    started_in = tmp_path / "elsewhere"
    example = started_in / "examples" / "digit_sort"
    example.mkdir(parents=True)
    reward = "def sorted_exactly(completion, **_):\n    return float(completion == '')\n"
    (example / "reward.py").write_text(reward)
    done = subprocess.run(
        [str(paceline), "demo", "--set", "train.steps=12", "--set", "train.eval_every=6"],
        cwd=started_in,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(600),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (example / "reward.py").read_text() == reward
    assert {"digit_sort.toml", "pairs.jsonl", "model-0.1M"} < {p.name for p in example.iterdir()}
    summary = json.loads((started_in / "runs" / "digit-sort" / "summary.json").read_text())
    assert (summary["steps"], summary["samples_lost"], summary["samples_duplicated"]) == (12, 0, 0)
    assert "The exported model, on prompts that it was not trained on:" in done.stdout
