"""A rendered Ray job on a real cluster of this machine: `ray job submit` runs a training, also past
the loss of the head."""

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.rpc.addresses import free_ports
from testbed.fleets.local_run import SLOWLY, Commands, write_run
from testbed.patience import patient
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


def submitted(where: Path, head: RayHead, steps: int) -> Commands:
    """``submit.sh`` of a run in ``where/run``."""
    job = Commands(where / "run")
    config = write_run(
        where,
        run={"name": f"job-{os.getpid()}"},
        reward=SLOWLY,
        train={"steps": steps, "checkpoint_every": 5, "eval_every": 100},
        fleet={"controllers": 1, "policy": 1, "rollout": 1},
    )
    controller, rest = free_ports("", 2)
    options = ("--set", f"controller.port={controller}", "--set", f"rest.port={rest}")
    folder = where / "job"
    folder.mkdir()
    for name, text in render(config, "ray", "--run-dir", str(job.run_dir), *options).items():
        (folder / name).write_text(text)
    environment = {**base_environment(where), "RAY_API_SERVER_ADDRESS": head.job_server}
    job.launch("submit", ["bash", str(folder / "submit.sh")], {**os.environ, **environment})
    return job


@pytest.fixture
def head(tmp_path: Path) -> Iterator[RayHead]:
    made = RayHead(tmp_path / "ray", jobs=True)
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_a_job_trains_to_its_end_although_the_head_is_lost(head: RayHead, tmp_path: Path) -> None:
    job = submitted(tmp_path, head, steps=16)
    try:
        job.steps(3)
        head.lose()
        head.start()
        assert job.ended("submit", 300.0) == 0, job.said()
        job.assert_sound(steps=16)
        assert "it is submitted again" in job.output_of("submit").read_text()
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
