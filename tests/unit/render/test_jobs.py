"""Jobs of Slurm, Ray and PAI-DLC: their scripts run with commands that only note how they were
called, which exist, have the run's settings and show no secret."""

import json
import re
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import load_config
from paceline_launcher.launch.job import NodeJob, RunOutcome, write_job, write_outcome
from tests.fixtures.rendered import (
    CPU,
    IMAGE,
    OWN_REDIS,
    ROOT,
    STUB,
    base_environment,
    check_command,
    commands_of,
    install,
    render,
    shorten_pauses,
)

SECRET = {"REDIS_URL": "redis://:pw@there:6379/0"}
FIELDS = json.loads((ROOT / "tests/fixtures/pai_dlc_fields.json").read_text())
NEEDED = (
    *("--image", IMAGE, "--workspace", "4711", "--resource-quota", "quota1"),
    *("--volume", "d-runs:/runs"),
)


def check_config(words: list[str], provider: str) -> None:
    """The run's settings are in a private file, with the address of Redis."""
    config = load_config(words[2], re.findall(r"--set (\S+)", " ".join(words)))
    assert config.fleet.provider == provider
    assert config.redis.url == SECRET["REDIS_URL"] and config.rest.port != 0
    assert "pw@" not in " ".join(words)
    assert Path(words[2]).stat().st_mode & 0o77 == 0


def script_in(directory: Path, script: str) -> str:
    """``script`` with its files in ``directory``."""
    script = re.sub(r"^run_dir=.*$", f"run_dir={directory}", script, flags=re.MULTILINE)
    return script.replace("config=/tmp/", f"config={directory}/")


def rendered(*options: str) -> str:
    (text,) = render(CPU, "slurm", *options).values()
    return text


def directives(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, re.MULTILINE)
    assert len(found) == script.count("#SBATCH"), "a line that sbatch would not read"
    return dict(found)


ON_EVERY_NODE = """\
env > "$CALLS.srun"
while [ "${1#--}" != "$1" ]; do shift; done
for n in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$n "$@"; done
"""
"""The command of the step, which srun calls after its own options."""
NOTES = """\
echo "$RANK of $WORLD_SIZE, $MASTER_ADDR" >> "$CALLS.nodes"
[ -z "$OUTCOME" ] || echo "$OUTCOME" > runs/demo/nodes/outcome.json
exit ${STATUS:-0}
"""


class Submitted:
    """The script as Slurm starts it, with commands that only note how they were called."""

    def __init__(self, where: Path, script: str, **environment: str) -> None:
        self.where, self.run_dir = where, where / "runs/demo"
        bin_dir = where / "bin"
        install(bin_dir, "paceline", STUB + NOTES)
        install(bin_dir, "srun", STUB + ON_EVERY_NODE)
        install(bin_dir, "scontrol", STUB + '[ "$1" != show ] || printf "first\\nsecond\\n"\n')
        self.calls_file = where / "calls"
        for left in where.glob("calls*"):
            left.unlink()
        nodes = directives(script)["nodes"]
        self.done = subprocess.run(
            ["bash", "-c", script],
            env={
                **base_environment(bin_dir),
                "CALLS": str(self.calls_file),
                "SLURM_JOB_ID": "4711",
                "SLURM_JOB_NODELIST": "node[0-1]",
                "SLURM_NNODES": nodes,
                "SLURM_CPUS_PER_TASK": directives(script)["cpus-per-task"],
                **environment,
            },
            cwd=where,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self, name: str) -> list[list[str]]:
        lines = self.calls_file.read_text().split("\0\n")[:-1]
        return [words for line in lines if (words := line.split("\0"))[0] == name]

    def ranks(self) -> list[str]:
        return Path(f"{self.calls_file}.nodes").read_text().splitlines()

    def environment(self) -> dict[str, str]:
        lines = Path(f"{self.calls_file}.srun").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


def test_every_node_runs_the_same_command_on_a_config_that_loads(tmp_path: Path) -> None:
    script = rendered("--nodes", "2", "--partition", "cpu", *OWN_REDIS)
    job = Submitted(tmp_path, script, **SECRET)
    assert job.done.returncode == 0, job.done.stderr
    (step,) = job.calls("srun")
    assert "--nodes=2" in step and "--ntasks-per-node=1" in step
    calls = job.calls("paceline")
    assert calls == [calls[0]] * 2
    assert check_command(calls[0]) == "node"
    assert job.ranks() == ["0 of 2, first", "1 of 2, first"]
    check_config(calls[0], "local")


def ports_of(job: Submitted) -> set[int]:
    """All that node 0 of the job listens on: controllers, Redis, and their REST interfaces."""
    config = load_config(job.calls("paceline")[0][2])
    first, controllers = int(job.environment()["MASTER_PORT"]), config.fleet.controllers
    (rest,) = re.findall(r"rest\.port=(\d+)", " ".join(job.calls("paceline")[0]))
    used = [*range(first, first + controllers + 1), *range(int(rest), int(rest) + controllers)]
    assert len(set(used)) == len(used)
    return set(used)


def test_two_jobs_on_a_node_have_ports_of_their_own(tmp_path: Path) -> None:
    numbers = ("4711", "4712", "123456789")
    for text in (rendered(), rendered("--set", "fleet.controllers=7")):
        first, second, third = (
            ports_of(Submitted(tmp_path, text, SLURM_JOB_ID=number)) for number in numbers
        )
        assert not first & second and not first & third and not second & third
        assert all(10240 <= port < 32768 for port in first | second | third)


def test_a_job_whose_ports_are_taken_takes_the_next(tmp_path: Path) -> None:
    script = rendered()
    before = min(ports_of(Submitted(tmp_path, script)))
    with socket.socket() as other:
        other.bind(("127.0.0.1", before + 1))
        other.listen()
        assert min(ports_of(Submitted(tmp_path, script))) == before + 16


def test_secrets_come_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    script = rendered(*OWN_REDIS)
    job = Submitted(tmp_path, script)
    assert job.done.returncode != 0 and "REDIS_URL: is not set" in job.done.stderr

    secrets = job.run_dir / "secrets.env"
    secrets.write_text("REDIS_URL='redis://:pw@there/0'\nPACELINE_TOKEN=from-file\n")
    secrets.chmod(0o644)
    job = Submitted(tmp_path, script)
    assert job.done.returncode == 2 and f"chmod 600 {secrets}" in job.done.stderr

    secrets.chmod(0o600)
    job = Submitted(tmp_path, script)
    assert job.done.returncode == 0, job.done.stderr
    assert job.environment()["PACELINE_TOKEN"] == "from-file"
    elsewhere = tmp_path / "mine"
    secrets.rename(elsewhere)
    assert Submitted(tmp_path, script, PACELINE_SECRETS=str(elsewhere)).done.returncode == 0


@pytest.mark.parametrize(
    ("node", "written", "restarts", "status", "again"),
    [
        ("0", None, "0", 0, False),
        ("1", None, "0", 1, False),
        # Node 0 said how the run ended: another node's status counts no more.
        ("1", 0, "0", 0, False),
        ("0", 1, "0", 1, False),
        ("130", None, "0", 130, True),
        ("137", None, "19", 137, True),
        ("137", None, "20", 137, False),
    ],
)
def test_the_job_has_the_exit_status_of_the_run(
    tmp_path: Path, node: str, written: int | None, restarts: str, status: int, again: bool
) -> None:
    # That of an earlier start says nothing.
    write_outcome(tmp_path / "runs/demo", RunOutcome("s", "finished", 99, ""))
    environment = {"STATUS": node, "SLURM_RESTART_COUNT": restarts}
    if written is not None:
        write_outcome(tmp_path / "other", RunOutcome("s", "failed", written, 'an "exit_code": 7'))
        environment["OUTCOME"] = (tmp_path / "other/nodes/outcome.json").read_text()
    job = Submitted(tmp_path, rendered(), **environment)
    assert job.done.returncode == status
    assert (["scontrol", "requeue", "4711"] in job.calls("scontrol")) == again


def test_rays_entrypoint_has_the_controllers_and_ray_the_workers(tmp_path: Path) -> None:
    files = render(CPU, "ray", *OWN_REDIS)
    script = "python() { echo 10.0.0.7; }\n" + script_in(tmp_path / "run", files["start.sh"])
    (words,) = commands_of(script, tmp_path, SECRET)
    assert check_command(words) == "node"
    assert words[words.index("--master") + 1] == "10.0.0.7:7000"
    check_config(words, "ray")


RAY = """\
#!/bin/bash
echo "$@" >> "$CALLS"
case "$1 $2" in
  "job submit") [ "$(grep -c "job submit" "$CALLS")" -gt "$LOST" ] && exit "$STATUS"; exit 1 ;;
  "job status") [ "$(grep -c "job submit" "$CALLS")" -gt "$LOST" ] && echo "$SAID" ;;
esac
"""


@pytest.mark.parametrize(
    ("lost", "status", "said", "expected", "submitted"),
    [
        (0, 0, "SUCCEEDED", 0, 1),
        (0, 1, "Job entrypoint command failed with exit code 2, last logs", 2, 1),
        (0, 1, "Status for job 'a': STOPPED", 130, 1),
        (0, 1, "Status for job 'a': FAILED, runtime_env setup failed: no such file", 1, 1),
        # The head went, and another one knows nothing of the job.
        (2, 0, "SUCCEEDED", 0, 3),
        (1, 1, "Job entrypoint command failed with exit code 1, last logs", 1, 2),
    ],
)
def test_a_lost_job_is_submitted_again_and_a_failed_one_is_not(
    tmp_path: Path, lost: int, status: int, said: str, expected: int, submitted: int
) -> None:
    for name, text in render(CPU, "ray").items():
        (tmp_path / name).write_text(text)
    install(bin_dir := tmp_path / "bin", "ray", RAY)
    shorten_pauses(bin_dir)
    calls = tmp_path / "calls"
    environment = {**base_environment(bin_dir), "CALLS": str(calls), "SAID": said}
    done = subprocess.run(
        ["bash", str(tmp_path / "submit.sh")],
        env={**environment, "LOST": str(lost), "STATUS": str(status)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == expected, done.stderr
    jobs = [
        line.split() for line in calls.read_text().splitlines() if line.startswith("job submit")
    ]
    assert len(jobs) == submitted
    names = [words[words.index("--submission-id") + 1] for words in jobs]
    assert len(set(names)) == submitted, "an id is never used twice"
    assert all(words[-3:] == ["--", "sh", "start.sh"] for words in jobs)


def job_of(*options: str) -> dict[str, Any]:
    (text,) = render(CPU, "pai-dlc", *NEEDED, *options).values()
    return dict(json.loads(text))


def test_the_request_has_the_fields_of_the_api() -> None:
    for job in (job_of(), job_of("--job-type", "pytorch", "--nodes", "2")):
        assert {"DisplayName", "JobSpecs", "JobType", "UserCommand", "WorkspaceId"} <= set(job)
        for kind, found in (
            ("CreateJobRequest", [job]),
            ("JobSettings", [job["Settings"]]),
            ("DataSources", job["DataSources"]),
            ("JobSpec", job["JobSpecs"]),
            ("ResourceConfig", [spec["ResourceConfig"] for spec in job["JobSpecs"]]),
        ):
            assert all(set(one) <= set(FIELDS[kind]) for one in found), kind


def test_every_pod_of_pai_dlc_calls_a_command_on_a_config_that_loads(tmp_path: Path) -> None:
    addresses = ("10.0.0.7:7000", "10.0.0.7:7001")
    for spec in job_of(*OWN_REDIS)["JobSpecs"]:
        kind, where = spec["Type"], tmp_path / spec["Type"]
        write_job(where, NodeJob("s", "demo", 1, 0, "d", addresses))
        script = script_in(where, spec["UserCommand"]).replace("sleep 5", "sleep 0.1")
        (words,) = commands_of(script, where, SECRET)
        name = check_command(words)
        check_config(words, "none")
        if kind == "Controller":
            assert name == "node" and words[-1].endswith(":7000")
            continue
        assert name == kind.partition("-")[0].lower() and ",".join(addresses) in words
        assert name != "scorer" or words[words.index("--scorer") + 1] == "reference"


PACELINE = """\
#!/bin/sh
case $1 in
  rollout) touch "$RUN/started"; while [ ! -e "$RUN/drained" ]; do sleep 0.05; done ;;
  drain) echo "$PACELINE_TOKEN" > "$RUN/drained" ;;
esac
"""


def test_a_pod_that_is_taken_away_drains_its_worker_with_the_token_of_the_run(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    write_job(run, NodeJob("s", "demo", 1, 0, "d", ("10.0.0.7:7000",)))
    (run / "token").write_text("of-the-run")
    specs = job_of("--volume", f"d-own:{tmp_path}", "--run-dir", str(run))["JobSpecs"]
    (command,) = (spec["UserCommand"] for spec in specs if spec["Type"] == "Rollout")
    install(bin_dir := tmp_path / "bin", "paceline", PACELINE)
    shorten_pauses(bin_dir)
    environment = {**base_environment(bin_dir), "RUN": str(run)}
    pod = subprocess.Popen(["bash", "-c", command], env=environment, cwd=tmp_path)
    try:
        while not (run / "started").exists():
            assert pod.poll() is None
            time.sleep(0.05)
        pod.terminate()
        assert pod.wait(60) == 0
    finally:
        pod.kill()
    assert (run / "drained").read_text().strip() == "of-the-run"
