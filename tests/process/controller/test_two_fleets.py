"""Two fleets with one run name on one Redis."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from testbed.fleets.controller_processes import write_config
from testbed.patience import patient
from testbed.redis.redis_process import throwaway_redis


@pytest.mark.parametrize("lr", [1e-6, 5e-7], ids=["same config", "another config"])
def test_the_later_one_ends_and_names_the_other(lr: float, tmp_path: Path) -> None:
    """Each has a token of its own, in its run directory."""
    with throwaway_redis(tmp_path) as url:

        def start(name: str, peak: float) -> subprocess.Popen[str]:
            directory = tmp_path / name
            directory.mkdir()
            train = {"optimizer": {"lr": peak}}
            config = write_config(directory, redis={"url": url}, train=train)
            command = [sys.executable, "-m", "controller", str(config), "--id", "controller-0"]
            command += ["--run-dir", str(directory / "run")]
            return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

        first = start("first", 1e-6)
        try:
            assert first.stderr is not None
            while "leading" not in (line := first.stderr.readline()):
                assert line, "it has ended"
            second = start("second", lr)
            _, said = second.communicate(timeout=patient(60))
            assert second.returncode == 2, said
            last = said.splitlines()[-1]
            assert "of another fleet" in last and f"pid {first.pid}" in last
            assert first.poll() is None
        finally:
            first.kill()
            first.wait()
