"""A rendered Slurm job, run as it is: only `srun`, `scontrol` and the variables of an allocation
are stand-ins.

The stand-in of srun starts the nodes' processes on this machine, with one process for each node of
the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.config.sections.services import RedisConfig
from paceline.observe.fleet_file import FleetRecord
from paceline.redis.server import ensure_redis, stop_redis
from paceline.rpc.ports import free_ports
from testbed.fleets.local_run import ROOT, RunFiles, paceline, write_run
from testbed.patience import Patience, patient, until
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
SLOWLY = {"functions": ["testbed.rewards:digit_first_later"]}


class SlurmJob(RunFiles):
    """``sbatch`` of a run on two nodes. ``close`` leaves nothing of it behind."""

    def __init__(self, where: Path, config: Path, job_id: int = 4711) -> None:
        self.where, self.run_dir = where, where / "run"
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
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **more: str) -> None:
        with (self.where / "out").open("ab") as out:
            self.process = subprocess.Popen(
                ["bash", str(self.script)],
                stdout=out,
                stderr=out,
                cwd=self.where,
                env={**self.environment, **more},
                start_new_session=True,
            )

    def wait(self, limit_s: float = 240.0) -> int:
        assert self.process is not None
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job does not end:\n{self.said()}") from None

    def until(self, true: Callable[[], object]) -> None:
        """Polls until ``true()``; fails if the job ends or the time runs out first."""
        until(true, 180.0, goes_on=self._check, said=self.said)

    def _check(self) -> None:
        assert self.process is not None and self.process.poll() is None, self.said()

    def steps(self, goal: int) -> None:
        """Waits for so many steps."""
        self.until(lambda: self.step() >= goal)

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

    def said(self) -> str:
        return (self.where / "out").read_text(errors="replace") + self.logs()

    def homes(self) -> list[Path]:
        return [self.run_dir, *(self.run_dir / "nodes").glob("node-*")]

    def close(self) -> None:
        if self.process is not None:
            # Nothing in the group outlives the job: srun's stand-in and the nodes' shells are in
            # it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.end_all()


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
    job.steps(job.step() + 2)

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
    summary = job.summary()
    assert summary["status"] == "finished" and summary["steps"] == 24, job.said()
    assert summary["samples_lost"] == summary["samples_duplicated"] == 0
    assert (Path(summary["export"]) / "config.json").is_file()
    assert job.alive() == [], "controllers and Redis end with the run"
    started = "show hostnames node[0-1]"
    assert job.calls() == [started, "requeue 4711", started], "a finished run is not queued again"
    assert (job.run_dir / "token").stat().st_mode & 0o77 == 0
    assert (job.run_dir / "slurm.toml").stat().st_mode & 0o77 == 0


def test_a_failed_run_fails_its_job(made: list[SlurmJob], tmp_path: Path) -> None:
    config = write_run(tmp_path, model={"path": str(tmp_path / "model"), "device": "cpu"})
    job = SlurmJob(tmp_path, config)
    made.append(job)
    (tmp_path / "train.jsonl").unlink()
    job.start()
    assert job.wait() == 2, job.said()
    assert str(tmp_path / "train.jsonl") in job.said()
    assert not any(call.startswith("requeue") for call in job.calls())


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
    jobs: list[subprocess.Popen[bytes]] = []

    def submit(script: str) -> None:
        with (tmp_path / "out").open("ab") as out:
            jobs.append(
                subprocess.Popen(
                    ["bash", "-c", script],
                    stdout=out,
                    stderr=out,
                    cwd=tmp_path,
                    env={**environment, "run_dir": str(run_dir), "SLURM_ARRAY_TASK_ID": "0"},
                    start_new_session=True,
                )
            )

    try:
        submit(controllers)
        patience = Patience(60)
        while not (run_dir / "addresses").exists():
            assert patience.left(), (tmp_path / "out").read_text()
            time.sleep(0.1)
        submit(worker)
        submit(worker.replace("paceline rollout", "paceline policy").replace("rollout-", "policy-"))
        assert [job.wait(patient(240)) for job in jobs] == [0, 0, 0], (tmp_path / "out").read_text()
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
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        stop_redis(run_dir)
