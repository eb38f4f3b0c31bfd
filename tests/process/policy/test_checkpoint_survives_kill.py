"""SIGKILL at any instant leaves the old checkpoints, or the old ones and a complete new one."""

import json
import os
import subprocess
import sys
from pathlib import Path

from testbed.patience import patient

HERE = Path(__file__).resolve().parents[2] / "fixtures"


def test_kill_mid_save_leaves_only_complete_checkpoints(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "kill_while_saving.py", tmp_path, "30", "1"],
        capture_output=True,
        text=True,
        timeout=patient(120),
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    # The kills must have hit writes under way, or the test shows nothing.
    assert counts["killed"] >= 15, counts
    assert counts["left_unfinished"] >= 5, counts
    assert len(counts["newest"]) >= 2, counts
