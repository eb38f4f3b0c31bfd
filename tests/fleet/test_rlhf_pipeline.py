"""The RLHF example as a user starts it: every stage begins with the export of the one before, also
after a kill.

Each stage starts a fleet and an export, which is most of its time: in every run are those up to the
one that is killed. Those of PPO and DPO, which are wired in the same way, are in
tests/unit/examples/test_rlhf_stages.py, and runs of both in test_short_flows.py.
"""

import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from examples.rlhf.stages import PIPELINES, PREFERENCES
from testbed.fleets.local_run import ROOT, RunFiles
from testbed.patience import Patience, patient

STAGES = PIPELINES["ppo"][:-1]
"""All but PPO itself."""

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


class Pipeline:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.output = root.with_suffix(".out")
        words = [sys.executable, "-m", "examples.rlhf", "ppo", "--short", "--dir", str(root)]
        with self.output.open("ab") as out:
            self.process = subprocess.Popen(
                [*words, "--stages", ",".join(STAGES)], cwd=ROOT, stdout=out, stderr=out
            )

    def until(self, true: Callable[[], object], limit_s: float = 300.0) -> None:
        patience = Patience(limit_s)
        while not true():
            assert self.process.poll() is None, self.output.read_text()
            assert patience.left(), self.output.read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """With its `paceline up`, as a machine that fails does; what that started goes on."""
        children = psutil.Process(self.process.pid).children()
        for one in (psutil.Process(self.process.pid), *children):
            one.kill()
        self.process.wait()


class Stage(RunFiles):
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir


def committed(run_dir: Path) -> list[int]:
    """Steps in metrics.jsonl."""
    return [row["step"] for row in Stage(run_dir).metrics() if row["kind"] == "step"]


def config(run_dir: Path) -> dict[str, Any]:
    return tomllib.loads((run_dir / "config.toml").read_text())


def end_leftovers(root: Path) -> None:
    for run_dir in root.iterdir():
        Stage(run_dir).end_all()


def test_a_pipeline_that_is_killed_goes_on_in_the_middle_of_a_stage(tmp_path: Path) -> None:
    root = tmp_path / "rlhf"
    first = Pipeline(root)
    try:
        first.until(lambda: committed(root / "reward_model"))
        first.kill()
        before = committed(root / "reward_model")
        sft = (root / "sft" / "summary.json").stat().st_mtime_ns
        pairs = (root / "preferences" / "pairs.jsonl").stat().st_mtime_ns
        second = Pipeline(root)
        assert second.process.wait(patient(700)) == 0, second.output.read_text()
    finally:
        if first.process.poll() is None:
            first.kill()
        end_leftovers(root)
    # What was done is not done again; what was cut is continued.
    assert (root / "sft" / "summary.json").stat().st_mtime_ns == sft
    assert (root / "preferences" / "pairs.jsonl").stat().st_mtime_ns == pairs
    assert before[0] == 1 and sorted(set(committed(root / "reward_model"))) == list(range(1, 9))
    for name in (one for one in STAGES if one != PREFERENCES):
        run_dir = root / name
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["status"], summary["ledger_ok"]) == ("finished", True)
        assert (summary["samples_lost"], summary["samples_duplicated"]) == (0, 0)
        begun_from = config(run_dir)["model"]["path"]
        assert name == "sft" or begun_from == str(root / "sft" / "export")
    said, count = second.output.read_text(), len(STAGES)
    assert f"[1/{count}] sft: is done already" in said and f"[3/{count}] reward_model: done" in said
    assert str(root / STAGES[-1] / "export") in said.rpartition("exported models:")[2]
