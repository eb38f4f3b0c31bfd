"""Slurm: a batch script whose ports are its job's alone, and whose commands exist."""

import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from paceline.config.load import load_config
from paceline_launcher.launch.job import RunOutcome, write_outcome
from tests.fixtures.rendered import EXAMPLES, STUB, base_environment, check_command, render

CPU = EXAMPLES / "digit_sort.toml"
OWN_REDIS = ("--set", "redis.url=redis://:hidden@here:6379/0", "--set", "redis.host=0.0.0.0")
VARIANTS: dict[str, tuple[Any, ...]] = {
    "cpu": (CPU, "--nodes", "2", "--partition", "cpu", "--account", "rl"),
    "one node": (CPU,),
    "own redis": (CPU, "--nodes", "2", *OWN_REDIS),
}


@pytest.fixture(scope="module", params=VARIANTS)
def script(request: pytest.FixtureRequest) -> str:
    return rendered(*VARIANTS[request.param])


def rendered(config: Path, *options: str) -> str:
    (text,) = render(config, "slurm", *options).values()
    return text


def directives(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", script, re.MULTILINE)
    assert len(found) == script.count("#SBATCH"), "a line that sbatch would not read"
    return dict(found)


class Submitted:
    """The script as Slurm starts it, with commands that only note how they were called."""

    def __init__(self, where: Path, script: str, **environment: str) -> None:
        self.where, self.run_dir = where, where / "runs/demo"
        bin_dir = where / "bin"
        bin_dir.mkdir(exist_ok=True)
        for name in ("paceline", "srun", "scontrol"):
            (bin_dir / name).write_text(STUB)
            (bin_dir / name).chmod(0o755)
        # On every node: the command of the step, which srun calls after its own options.
        with (bin_dir / "srun").open("a") as stub:
            stub.write('env > "$CALLS.srun"\nwhile [ "${1#--}" != "$1" ]; do shift; done\n')
            stub.write('for n in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$n "$@"; done\n')
        with (bin_dir / "paceline").open("a") as stub:
            stub.write('echo "$RANK of $WORLD_SIZE, $MASTER_ADDR" >> "$CALLS.nodes"\n')
            stub.write('[ -z "$OUTCOME" ] || echo "$OUTCOME" > runs/demo/nodes/outcome.json\n')
            stub.write("exit ${STATUS:-0}\n")
        with (bin_dir / "scontrol").open("a") as stub:
            stub.write('[ "$1" != show ] || printf "first\\nsecond\\n"\n')
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


def test_every_node_runs_the_same_command_on_a_config_that_loads(
    script: str, tmp_path: Path
) -> None:
    job = Submitted(tmp_path, script, REDIS_URL="redis://:pw@there/0")
    assert job.done.returncode == 0, job.done.stderr
    (step,) = job.calls("srun")
    nodes = int(directives(script)["nodes"])
    assert f"--nodes={nodes}" in step and "--ntasks-per-node=1" in step
    calls = job.calls("paceline")
    assert calls == [calls[0]] * nodes
    assert check_command(calls[0]) == "node"
    assert job.ranks() == [f"{rank} of {nodes}, first" for rank in range(nodes)]
    overrides = [
        word for before, word in zip(calls[0], calls[0][1:], strict=False) if before == "--set"
    ]
    config = load_config(calls[0][2], overrides)
    assert config.fleet.provider == "local", "paceline node starts the workers"
    assert config.rest.port != 0
    if "REDIS_URL" in script:
        assert config.redis.url == "redis://:pw@there/0"
        assert "pw@" not in " ".join(calls[0])
    assert Path(calls[0][2]).stat().st_mode & 0o77 == 0
    assert "hidden" not in script


def ports_of(job: Submitted) -> set[int]:
    """All that node 0 of the job listens on: controllers, Redis, and their REST interfaces."""
    config = load_config(job.calls("paceline")[0][2])
    first, controllers = int(job.environment()["MASTER_PORT"]), config.fleet.controllers
    (rest,) = re.findall(r"rest\.port=(\d+)", " ".join(job.calls("paceline")[0]))
    used = [*range(first, first + controllers + 1), *range(int(rest), int(rest) + controllers)]
    assert len(set(used)) == len(used)
    return set(used)


def test_two_jobs_on_a_node_have_ports_of_their_own(tmp_path: Path) -> None:
    few = rendered(CPU)
    many = rendered(CPU, "--set", "fleet.controllers=7")
    found = [
        ports_of(Submitted(tmp_path, text, SLURM_JOB_ID=number))
        for text in (few, many)
        for number in ("4711", "4712", "123456789")
    ]
    for text in (0, 3):
        first, second, third = found[text : text + 3]
        assert not first & second and not first & third and not second & third
    assert not found[3] & found[1] and not found[0] & found[4]
    assert all(10240 <= port < 32768 for ports in found for port in ports)


def test_a_job_whose_ports_are_taken_takes_the_next(tmp_path: Path) -> None:
    script = rendered(CPU)
    before = min(ports_of(Submitted(tmp_path, script)))
    with socket.socket() as other:
        other.bind(("127.0.0.1", before + 1))
        other.listen()
        assert min(ports_of(Submitted(tmp_path, script))) == before + 16


def test_secrets_come_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    script = rendered(*VARIANTS["own redis"])
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
    environment = {"STATUS": node, "SLURM_RESTART_COUNT": restarts}
    if written is not None:
        write_outcome(tmp_path / "other", RunOutcome("s", "failed", written, 'an "exit_code": 7'))
        environment["OUTCOME"] = (tmp_path / "other/nodes/outcome.json").read_text()
    job = Submitted(tmp_path, rendered(CPU), **environment)
    assert job.done.returncode == status
    assert (["scontrol", "requeue", "4711"] in job.calls("scontrol")) == again


def test_the_outcome_of_an_earlier_start_says_nothing(tmp_path: Path) -> None:
    earlier = tmp_path / "runs/demo/nodes/outcome.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text('{\n "exit_code": 0\n}\n')
    assert Submitted(tmp_path, rendered(CPU), STATUS="2").done.returncode == 2


def test_without_its_environment_the_job_says_so(tmp_path: Path) -> None:
    script = rendered(CPU)
    environment = {"PATH": os.defpath, "SLURM_JOB_ID": "1"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "activate its environment before sbatch" in done.stderr
