"""A rendered custom job of PAI-DLC, run as it is: each role's command is a "pod", a process group
of this machine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.rpc.addresses import free_ports
from testbed.fleets.local_run import SLOWLY, Commands, write_run
from tests.fixtures.rendered import base_environment, render

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


class Pods(Commands):
    """Pods of a job whose run directory is ``where/run``."""

    def __init__(self, where: Path, config: Path) -> None:
        super().__init__(where / "run")
        self.where, self.config = where, config
        self._commands = self._rendered()

    def _rendered(self) -> dict[str, str]:
        controller, rest = free_ports("", 2)
        options = ["--image", "r.example/p:1", "--workspace", "1", "--resource-quota", "quota1"]
        options += ["--volume", f"d-runs:{self.where}", "--run-dir", str(self.run_dir)]
        options += ["--set", f"controller.port={controller}", "--set", f"rest.port={rest}"]
        (text,) = render(self.config, "pai-dlc", *options).values()
        return {one["Type"]: one["UserCommand"] for one in json.loads(text)["JobSpecs"]}

    def start(self, kind: str) -> None:
        script = self._commands[kind].replace("config=/tmp/", f"config={self.where}/{kind}-")
        environment = {**os.environ, **base_environment(self.where)}
        self.launch(kind, ["sh", "-c", script], environment)

    def lose_the_controllers(self) -> None:
        """The pod is gone with every process in it. The one that is made in its place has another
        address."""
        self.started["Controller"].kill()
        self.started["Controller"].wait()
        self.end_all()
        self._commands = self._rendered()


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

    assert [pods.ended(kind) for kind in ("Controller", "Policy", "Rollout")] == [0, 0, 0]
    pods.assert_sound(steps=16)
