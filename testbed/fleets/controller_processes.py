"""Controller processes in a directory of their own, with a config for protocol-only workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from paceline.redis.server import stop_redis
from paceline.redis.users import CONTROLLER, user_url
from testbed.nested_settings import nested_sections
from testbed.patience import Patience

START_LIMIT_S = 100.0


def write_config(directory: Path, rows: int = 100, **sections: dict[str, Any]) -> Path:
    """A config for protocol-only workers; ``sections`` are added to it: train={"steps": 3}."""
    data = directory / "rows.jsonl"
    lines = (json.dumps({"prompt": f"s{i}=", "answer": str(i)}) for i in range(rows))
    data.write_text("\n".join(lines) + "\n")
    whole: dict[str, dict[str, Any]] = {
        "run": {"name": "load"},
        "model": {"path": "none"},
        "data": {"path": str(data), "max_prompt_tokens": 64},
    }
    for name, fields in sections.items():
        whole.setdefault(name, {}).update(fields)
    path = directory / "load.toml"
    path.write_text(tomli_w.dumps(nested_sections(whole)))
    return path


@dataclass
class ControllerProcess:
    """One started controller."""

    id: str
    process: subprocess.Popen[bytes]
    address: str

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """kill -9, and reaps it."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Controllers:
    """Starts controllers of one run; stops them and their embedded Redis at the end."""

    def __init__(self, directory: Path, config: Path) -> None:
        self.directory = directory
        self.config = config
        self.run_dir = directory / "run"
        self.options: list[str] = []
        """More arguments for those started from now on."""
        self.started: list[ControllerProcess] = []

    def start(self, controller_id: str = "controller-0", port: int = 0) -> ControllerProcess:
        """Returns once the process serves. Raises RuntimeError with its log if it ends first."""
        where = self.run_dir / "controllers" / f"{controller_id}.json"
        where.unlink(missing_ok=True)
        log = self.directory / f"{controller_id}.log"
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "controller", str(self.config)),
                    *("--run-dir", str(self.run_dir), "--id", controller_id),
                    *(("--port", str(port)) if port else ()),
                    *self.options,
                ],
                stderr=stream,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        patience = Patience(START_LIMIT_S)
        while not where.exists():
            if process.poll() is not None or not patience.left():
                process.kill()
                raise RuntimeError(log.read_text())
            time.sleep(0.005)
        address = json.loads(where.read_text())["address"]
        controller = ControllerProcess(controller_id, process, address)
        self.started.append(controller)
        return controller

    @property
    def redis_url(self) -> str:
        return user_url(self.run_dir / "redis", CONTROLLER)

    @property
    def redis_pid(self) -> int:
        return int((self.run_dir / "redis" / "pid").read_text().split()[0])

    def log(self, controller_id: str = "controller-0") -> str:
        return (self.directory / f"{controller_id}.log").read_text()

    def __enter__(self) -> Controllers:
        return self

    def __exit__(self, *_: object) -> None:
        living = [c for c in self.started if c.process.poll() is None]
        for controller in living:
            controller.thaw()
            controller.process.terminate()
        for controller in living:
            try:
                controller.process.wait(60)
            except subprocess.TimeoutExpired:
                controller.kill()
        stop_redis(self.run_dir)
