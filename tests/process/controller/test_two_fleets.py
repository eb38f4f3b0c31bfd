"""Two fleets with one run name on one Redis."""

import subprocess
import sys
from pathlib import Path

from testbed.fleets.controller_processes import write_config
from testbed.patience import patient
from testbed.redis.redis_process import throwaway_redis


def test_the_later_one_ends_and_names_the_other(tmp_path: Path) -> None:
    """Each has a token of its own, in its run directory."""
    with throwaway_redis(tmp_path) as url:
        config = write_config(tmp_path, redis={"url": url})

        def start(name: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "controller", str(config), "--id", "controller-0"]
            command += ["--run-dir", str(tmp_path / name)]
            return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

        first = start("first")
        try:
            assert first.stderr is not None
            while "leading" not in (line := first.stderr.readline()):
                assert line, "it has ended"
            second = start("second")
            _, said = second.communicate(timeout=patient(60))
            assert second.returncode == 2, said
            last = said.splitlines()[-1]
            assert "of another fleet" in last and f"pid {first.pid}" in last
            assert first.poll() is None
        finally:
            first.kill()
            first.wait()
