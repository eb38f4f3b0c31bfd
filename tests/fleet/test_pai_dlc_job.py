"""A rendered custom job of PAI-DLC, run as it is: each role's command is a "pod", a process group
of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.rpc.ports import free_ports
from testbed.fleets.local_run import ROOT, RunFiles, write_run
from testbed.patience import Patience
from tests.fixtures.rendered import base_environment, render

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
SLOWLY = {"functions": ["testbed.rewards:digit_first_later"]}


class Pods(RunFiles):
    """Pods of a job whose run directory is ``where/run``. ``close`` leaves nothing of them
    behind."""

    def __init__(self, where: Path, config: Path) -> None:
        self.where, self.config, self.run_dir = where, config, where / "run"
        self._commands = self._rendered()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _rendered(self) -> dict[str, str]:
        controller, rest = free_ports("", 2)
        options = ["--image", "r.example/p:1", "--workspace", "1", "--resource-quota", "quota1"]
        options += ["--volume", f"d-runs:{self.where}", "--run-dir", str(self.run_dir)]
        options += ["--set", f"controller.port={controller}", "--set", f"rest.port={rest}"]
        (text,) = render(self.config, "pai-dlc", *options).values()
        return {one["Type"]: one["UserCommand"] for one in json.loads(text)["JobSpecs"]}

    def start(self, kind: str) -> None:
        script = self._commands[kind].replace("config=/tmp/", f"config={self.where}/{kind}-")
        with (self.where / f"{kind}.out").open("ab") as out:
            self._processes[kind] = subprocess.Popen(
                ["sh", "-c", script],
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, **base_environment(self.where)},
                start_new_session=True,
            )

    def lose_the_controllers(self) -> None:
        """The pod is gone with every process in it. The one that is made in its place has another
        address."""
        self._processes["Controller"].kill()
        self._processes["Controller"].wait()
        self.end_all()
        self._commands = self._rendered()

    def wait(self, kind: str, limit_s: float = 240.0) -> int:
        try:
            return self._processes[kind].wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{kind} does not end:\n{self.said()}") from None

    def steps(self, more: int, limit_s: float = 180.0) -> None:
        goal, patience = self.step() + more, Patience(limit_s)
        while self.step() < goal:
            assert self._processes["Controller"].poll() is None, self.said()
            assert patience.left(), self.said()
            time.sleep(0.1)

    def said(self) -> str:
        text = "".join(f"\n--- {p.name}\n{p.read_text()}" for p in self.where.glob("*.out"))
        return text + self.logs()

    def close(self) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.end_all()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    fleet = {"controllers": 1, "policy": 1, "rollout": 1}
    train = {"steps": 16, "checkpoint_every": 8}
    made = Pods(tmp_path, write_run(tmp_path, reward=SLOWLY, train=train, fleet=fleet))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.long
def test_a_job_goes_on_with_controllers_that_have_another_address(pods: Pods) -> None:
    # In the order in which a cluster may start them.
    for kind in ("Rollout", "Controller", "Policy"):
        pods.start(kind)
    pods.steps(2)
    pods.lose_the_controllers()
    pods.start("Controller")
    pods.steps(2)

    assert [pods.wait(kind) for kind in ("Controller", "Policy", "Rollout")] == [0, 0, 0]
    summary = pods.summary()
    assert summary["status"] == "finished" and summary["steps"] == 16, pods.said()
    assert summary["samples_lost"] == summary["samples_duplicated"] == 0
    assert (Path(summary["export"]) / "config.json").is_file()
