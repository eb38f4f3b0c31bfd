"""Rendered jobs of Slurm and PAI-DLC, run as they are, in processes of this machine.

Only `srun`, `scontrol` and the variables of an allocation are stand-ins.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config.sections.services import RedisConfig
from paceline.observe.fleet_file import FleetRecord
from paceline.redis.server import ensure_redis, stop_redis
from paceline.rpc.addresses import free_ports
from testbed.fleets.local_run import ROOT, SLOWLY, Commands, paceline, write_run
from tests.fixtures.rendered import base_environment, render

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SRUN = """\
#!/usr/bin/env python3
# As many processes as nodes, each with its number; the highest exit status, as srun's.
import os, pathlib, subprocess, sys
words = sys.argv[1:]
command = words[[w.startswith("--") for w in words].index(False):]
nodes = range(int(os.environ["SLURM_NNODES"]))
started = [subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(n)}) for n in nodes]
pathlib.Path(os.environ["STEP"]).write_text(" ".join(str(one.pid) for one in started))
codes = [one.wait() for one in started]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """\
#!/bin/sh
echo "$@" >> "$CALLS"
case $1 in show) for node in $SLURM_NNODES; do echo 127.0.0.1; done ;; esac
"""


class SlurmJob(Commands):
    """``sbatch`` of a run on two nodes."""

    def __init__(self, where: Path, config: Path, job_id: int = 4711) -> None:
        super().__init__(where / "run")
        self.where = where
        files = render(config, "slurm", "--nodes", "2", "--run-dir", str(self.run_dir))
        self.script = where / "job.sbatch"
        self.script.write_text(files["job.sbatch"])
        bin_dir = where / "bin"
        bin_dir.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (bin_dir / name).write_text(text)
            (bin_dir / name).chmod(0o755)
        self.environment = {
            **os.environ,
            **base_environment(bin_dir),
            "SLURM_JOB_ID": str(job_id),
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_NNODES": "2",
            "SLURM_CPUS_PER_TASK": "2",
            "CALLS": str(where / "calls"),
            "STEP": str(where / "step"),
        }

    def start(self, **more: str) -> None:
        command = ["bash", str(self.script)]
        self.launch("job", command, {**self.environment, **more}, cwd=self.where)

    def wait(self) -> int:
        return self.ended("job")

    def nodes(self) -> list[int]:
        """Process ids of the nodes' shells, in the order of their ranks."""
        return [int(word) for word in (self.where / "step").read_text().split()]

    def command_of(self, rank: int) -> int:
        """Process id of `paceline node` on that node."""
        shell = self.nodes()[rank]
        return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])

    def pid(self, name: str) -> int:
        """Of the newest process that node 0 has started under that name; 0: it has started none."""
        record = FleetRecord.read(self.run_dir)
        found = record.processes if record is not None else []
        return next((p.ids[-1].pid for p in found if p.name == name and p.ids), 0)

    def calls(self) -> list[str]:
        path = self.where / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def homes(self) -> list[Path]:
        return [self.run_dir, *(self.run_dir / "nodes").glob("node-*")]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[SlurmJob]]:
    jobs: list[SlurmJob] = []
    try:
        yield jobs
    finally:
        for job in jobs:
            job.close()


@pytest.mark.long
def test_a_job_goes_on_when_a_node_is_killed_and_when_it_is_queued_again_at_its_time_limit(
    made: list[SlurmJob], tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        reward=SLOWLY,
        train={"steps": 24, "checkpoint_every": 100},
        # One step a second: the run does not end before its time limit.
        rollout={"max_sequences": 16},
        fleet={"policy": 1, "rollout": 1},
    )
    job = SlurmJob(tmp_path, config)
    made.append(job)
    job.start()
    job.steps(2)
    killed = job.pid("policy-0")
    os.kill(job.command_of(0), signal.SIGKILL)
    # Until the command is back, what it had started goes on.
    job.until(lambda: job.pid("policy-0") not in (0, killed))
    job.steps(2)

    # What `--signal=TERM` does: every process of the step gets it, and the script none.
    for rank, shell in enumerate(job.nodes()):
        os.kill(job.command_of(rank), signal.SIGTERM)
        os.kill(shell, signal.SIGTERM)
    assert job.wait() == 130, job.said()
    assert job.calls()[-1] == "requeue 4711"
    stopped = job.summary()
    assert stopped["checkpoint_step"] == stopped["steps"] > 0

    job.start(SLURM_RESTART_COUNT="1")
    assert job.wait() == 0, job.said()
    job.assert_sound(steps=24)
    started = "show hostnames node[0-1]"
    assert job.calls() == [started, "requeue 4711", started], "a finished run is not queued again"
    assert (job.run_dir / "token").stat().st_mode & 0o77 == 0
    assert (job.run_dir / "slurm.toml").stat().st_mode & 0o77 == 0


def blocks_of_the_page() -> tuple[str, str]:
    """Shell texts of docs/clusters.md: the controllers' job, and a worker's."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    _, _, section = page.partition("### Each role a job of its own")
    section = section.partition("\n## ")[0]
    found = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    first, second = (re.sub(r"^    ", "", text, flags=re.MULTILINE) for text in found)
    return first, second


def test_roles_in_jobs_of_their_own_end_with_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_run(
        tmp_path,
        fleet={"policy": 1, "rollout": 1, "provider": "none"},
        controller={"host": "0.0.0.0"},
        redis={"host": "0.0.0.0"},
        auth={"token_file": str(run_dir / "token")},
    )
    controllers, worker = blocks_of_the_page()
    for before, port in zip(("7000", "7001"), free_ports("", 2), strict=True):
        controllers = controllers.replace(f":{before}", f":{port}")
    controllers = controllers.replace("$(hostname -f)", "127.0.0.1")
    environment = {**os.environ, **base_environment(tmp_path), "PYTHONPATH": str(ROOT)}
    jobs = Commands(run_dir)

    def submit(name: str, script: str) -> None:
        more = {"run_dir": str(run_dir), "SLURM_ARRAY_TASK_ID": "0"}
        jobs.launch(name, ["bash", "-c", script], environment | more, cwd=tmp_path)

    try:
        submit("controllers", controllers)
        jobs.until((run_dir / "addresses").exists, 60)
        submit("rollout", worker)
        policy = worker.replace("paceline rollout", "paceline policy")
        submit("policy", policy.replace("rollout-", "policy-"))
        assert [jobs.ended(name) for name in jobs.started] == [0, 0, 0], jobs.said()
        summary = json.loads((run_dir / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("finished", 6)
        assert (Path(summary["export"]) / "config.json").is_file()
        # Nobody answers any more: the run's files say how it ended.
        (run_dir / "summary.json").unlink()
        addresses = (run_dir / "addresses").read_text().strip()
        where = ("--controllers", addresses, "--run-dir", str(run_dir))
        late = paceline("wait", str(tmp_path / "run.toml"), *where)
        assert late.returncode == 0, late.stdout + late.stderr
        assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
        url = ensure_redis(run_dir, RedisConfig()).url
        shown = paceline("ledger", "verify", "--redis-url", url, "--run", "tiny")
        assert shown.returncode == 0, shown.stdout + shown.stderr
    finally:
        jobs.close()
        stop_redis(run_dir)


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
