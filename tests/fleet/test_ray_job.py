"""A rendered Ray job on a real cluster of this machine: `ray job submit` runs a training, also past
the loss of the head."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.rpc.ports import free_ports
from testbed.fleets.local_run import RunFiles, write_run
from testbed.patience import Patience, patient
from tests.fixtures.ray_head import RayHead
from tests.fixtures.rendered import base_environment, render

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(one) for one in ("ray", "aiohttp_cors", "opencensus")),
        reason="Ray is not installed, or not its job server: pip install 'paceline[ray]'",
    ),
]
SLOWLY = {"functions": ["testbed.rewards:digit_first_later"]}


class Job(RunFiles):
    """``submit.sh`` of a run. ``close`` leaves nothing of it behind."""

    def __init__(self, where: Path, head: RayHead, steps: int) -> None:
        self.where, self.run_dir = where, where / "run"
        config = write_run(
            where,
            run={"name": f"job-{os.getpid()}"},
            reward=SLOWLY,
            train={"steps": steps, "checkpoint_every": 5, "eval_every": 100},
            fleet={"controllers": 1, "policy": 1, "rollout": 1},
        )
        controller, rest = free_ports("", 2)
        options = ("--set", f"controller.port={controller}", "--set", f"rest.port={rest}")
        self.folder = where / "job"
        self.folder.mkdir()
        for name, text in render(config, "ray", "--run-dir", str(self.run_dir), *options).items():
            (self.folder / name).write_text(text)
        with (where / "submit.out").open("ab") as out:
            self.process = subprocess.Popen(
                ["bash", str(self.folder / "submit.sh")],
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    **base_environment(where),
                    "RAY_API_SERVER_ADDRESS": head.job_server,
                },
                start_new_session=True,
            )

    def steps(self, goal: int, limit_s: float = 240.0) -> None:
        patience = Patience(limit_s)
        while self.step() < goal:
            assert self.process.poll() is None and patience.left(), self.said()
            time.sleep(0.1)

    def wait(self, limit_s: float = 300.0) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end:\n{self.said()}") from None

    def said(self) -> str:
        return (self.where / "submit.out").read_text(errors="replace") + self.logs()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.end_all()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[RayHead]:
    made = RayHead(tmp_path / "ray", jobs=True)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_a_job_trains_to_its_end_although_the_head_is_lost(head: RayHead, tmp_path: Path) -> None:
    job = Job(tmp_path, head, steps=16)
    try:
        job.steps(3)
        head.lose()
        head.start()
        assert job.wait() == 0, job.said()
        summary = job.summary()
        assert summary["status"] == "finished" and summary["steps"] == 16, job.said()
        assert summary["samples_lost"] == summary["samples_duplicated"] == 0
        assert (Path(summary["export"]) / "config.json").is_file()
        assert "it is submitted again" in (tmp_path / "submit.out").read_text()
        assert places_left(head, tmp_path) == [], "resources of the run are given back"
    finally:
        job.close()


def places_left(head: RayHead, where: Path) -> list[str]:
    """States of placement groups that still hold resources, from Ray's own command."""
    code = (
        "import json, ray; ray.init(address='auto', log_to_driver=False, logging_level='ERROR')\n"
        "from ray.util import placement_group_table\n"
        "print(json.dumps([g['state'] for g in placement_group_table().values()]))\n"
    )
    environment = {**os.environ, **base_environment(where), "RAY_ADDRESS": head.address}
    done = subprocess.run(
        ["python", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert done.returncode == 0, done.stderr
    return [state for state in json.loads(done.stdout.splitlines()[-1]) if state != "REMOVED"]
