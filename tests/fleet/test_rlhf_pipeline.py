"""The RLHF example as a user starts it: every stage begins with the export of the one before, also
after a kill.

Each stage starts a fleet and an export, which is most of its time: in every run are those up to the
one that is killed. Those of PPO and DPO, which are wired in the same way, are in
tests/unit/examples/test_rlhf_stages.py, and runs of both in test_short_flows.py.
"""

import json
import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoModelForSequenceClassification

from examples.rlhf.stages import PIPELINES, PREFERENCES
from testbed.fleets.local_run import Commands

STAGES = PIPELINES["ppo"][:-1]
"""All but PPO itself."""

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]


class Pipeline(Commands):
    """A pipeline in the directory ``run_dir``, which may be started more than once."""

    def start(self, name: str) -> None:
        words = ["ppo", "--short", "--dir", str(self.run_dir), "--stages", ",".join(STAGES)]
        self.launch(name, [sys.executable, "-m", "examples.rlhf", *words])

    def kill(self, name: str) -> None:
        """With its `paceline up`, as a machine that fails does; what that started goes on."""
        process = psutil.Process(self.started[name].pid)
        for one in (process, *process.children()):
            one.kill()
        self.started[name].wait()

    def homes(self) -> list[Path]:
        return list(self.run_dir.glob("*"))


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Those in metrics.jsonl."""
    return [row for row in Commands(run_dir).metrics() if row["kind"] == "step"]


def committed(run_dir: Path) -> list[int]:
    return [row["step"] for row in steps_of(run_dir)]


def config(run_dir: Path) -> dict[str, Any]:
    return tomllib.loads((run_dir / "config.toml").read_text())


def test_a_pipeline_that_is_killed_goes_on_in_the_middle_of_a_stage(tmp_path: Path) -> None:
    root = tmp_path / "rlhf"
    pipeline = Pipeline(root)
    try:
        pipeline.start("first")
        pipeline.until(lambda: committed(root / "reward_model"), 300.0)
        pipeline.kill("first")
        before = committed(root / "reward_model")
        sft = (root / "sft" / "summary.json").stat().st_mtime_ns
        pairs = (root / "preferences" / "pairs.jsonl").stat().st_mtime_ns
        pipeline.start("second")
        assert pipeline.ended("second", 700.0) == 0, pipeline.said()
    finally:
        pipeline.close()
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
    said, count = pipeline.output_of("second").read_text(), len(STAGES)
    assert f"[1/{count}] sft: is done already" in said and f"[3/{count}] reward_model: done" in said
    assert str(root / STAGES[-1] / "export") in said.rpartition("exported models:")[2]

    # Both completions of a pair have one score before the first update.
    first = steps_of(root / "reward_model")[0]
    assert first["pair_accuracy"] == pytest.approx(0.5)
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-4)
    model = AutoModelForSequenceClassification.from_pretrained(root / "reward_model" / "export")
    assert type(model).__name__ in model.config.architectures
