"""SIGKILL at any instant leaves the old checkpoints, or the old ones and a complete new one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from policy_worker.checkpoint.atomic_directory import (
    locked_directory,
    put_in_place,
    remove_unlocked,
)
from testbed.patience import patient

HERE = Path(__file__).resolve().parents[2] / "fixtures"


def test_kill_mid_save_leaves_only_complete_checkpoints(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "kill_while_saving.py", tmp_path, "40", "1"],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    # The kills must have hit writes under way, or the test shows nothing.
    assert counts["killed"] >= 20, counts
    assert counts["left_unfinished"] >= 5, counts
    assert len(counts["newest"]) >= 3, counts


def test_litter_of_a_dead_writer_is_removed_and_that_of_a_living_one_kept(tmp_path):
    with locked_directory(tmp_path / "alive"):
        (tmp_path / "dead").mkdir()
        (tmp_path / "dead" / "half").write_text("")
        for name in ("alive", "dead"):
            remove_unlocked(tmp_path / name)
        assert [p.name for p in tmp_path.iterdir()] == ["alive"]
    remove_unlocked(tmp_path / "alive")
    assert list(tmp_path.iterdir()) == []


def test_a_new_directory_takes_the_place_of_the_old_one(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "value").write_text("old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "value").write_text("new")
    with locked_directory(tmp_path / "new"):  # as a writer holds it
        put_in_place(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old" / "value").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
