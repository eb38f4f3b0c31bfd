"""Ray actor: runs the normal worker command on the machine that Ray chose."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from paceline.process.torchrun_environment import without_place

LAUNCH = (
    "import os, sys; from paceline.process.lifetime import die_with; die_with(int(sys.argv[1]));"
    "os.execv(sys.executable, [sys.executable, '-P', '-m', *sys.argv[2:]])"
)
"""The parent death signal stays set across the exec."""


class WorkerActor:
    """Starts one worker. The worker ends with the actor, however the actor ends."""

    def __init__(
        self,
        module: str,
        config: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: str,
    ) -> None:
        """``config``: text of the TOML file. ``log``: file to append to."""
        with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as file:
            file.write(config)
        command = [module, file.name, *arguments]
        with _opened(Path(log)) as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", LAUNCH, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**without_place(os.environ), **environment},
            )

    def look(self) -> dict[str, Any]:
        """state (running or ended), pid, exit_code (None while it runs, negative for a signal)."""
        code = self._process.poll()
        state = "running" if code is None else "ended"
        return {"state": state, "pid": self._process.pid, "exit_code": code}


def _opened(path: Path) -> IO[Any]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")
