"""PAI-DLC: requests of CreateJob with the API's field names, whose commands exist and agree with
one another."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.config.load import load_config
from paceline.errors import BadInput
from paceline_launcher.cli import app
from paceline_launcher.launch.job import NodeJob, write_job
from tests.fixtures.rendered import (
    EXAMPLES,
    IMAGE,
    ROOT,
    base_environment,
    check_command,
    commands_of,
    render,
    shorten_pauses,
)

CPU = EXAMPLES / "digit_sort.toml"
NEEDED = (
    "--image",
    IMAGE,
    "--workspace",
    "4711",
    "--resource-quota",
    "quota1",
    "--volume",
    "d-runs:/runs",
)
OWN_REDIS = ("--set", "redis.url=redis://:hidden@here:6379/0")
VARIANTS: dict[str, tuple[Any, ...]] = {
    "custom, cpu": (CPU,),
    "custom, own redis": (CPU, *OWN_REDIS),
    "pytorch, cpu": (CPU, "--job-type", "pytorch", "--nodes", "2"),
    "pytorch, own redis": (CPU, "--job-type", "pytorch", *OWN_REDIS),
}
FIELDS = json.loads((ROOT / "tests/fixtures/pai_dlc_fields.json").read_text())


def job_of(config: Path, *options: str) -> dict[str, Any]:
    (text,) = render(config, "pai-dlc", *NEEDED, *options).values()
    return dict(json.loads(text))


@pytest.fixture(scope="module", params=VARIANTS)
def job(request: pytest.FixtureRequest) -> dict[str, Any]:
    return job_of(*VARIANTS[request.param])


def commands(job: dict[str, Any]) -> dict[str, str]:
    """Shell texts of the roles, by type."""
    if job["JobType"] == "PyTorchJob":
        return {one["Type"]: job["UserCommand"] for one in job["JobSpecs"]}
    return {one["Type"]: one["UserCommand"] for one in job["JobSpecs"]}


def test_the_request_has_the_fields_of_the_api(job: dict[str, Any]) -> None:
    assert set(job) <= set(FIELDS["CreateJobRequest"])
    assert {"DisplayName", "JobSpecs", "JobType", "UserCommand", "WorkspaceId"} <= set(job)
    assert set(job["Settings"]) <= set(FIELDS["JobSettings"])
    for one in job["DataSources"]:
        assert set(one) <= set(FIELDS["DataSources"])
    for spec in job["JobSpecs"]:
        assert set(spec) <= set(FIELDS["JobSpec"])
        assert set(spec["ResourceConfig"]) <= set(FIELDS["ResourceConfig"])
        assert all(isinstance(value, str) for value in spec["ResourceConfig"].values())
        assert spec["RestartPolicy"] in ("Always", "Never", "OnFailure", "ExitCode")
        assert isinstance(spec["PodCount"], int)
    assert sum(spec.get("IsChief", False) for spec in job["JobSpecs"]) <= 1
    assert "hidden" not in str(job)


def calls_of(text: str, where: Path) -> list[list[str]]:
    """Calls of ``paceline`` by a pod, in a run whose controllers have started."""
    run_dir = where / "runs"
    run_dir.mkdir(parents=True, exist_ok=True)
    write_job(run_dir, NodeJob("s", "demo", 1, 0, {}, "d", ("10.0.0.7:7000", "10.0.0.7:7001")))
    lines = [
        f"run_dir={run_dir}" if line.startswith("run_dir=") else line for line in text.splitlines()
    ]
    script = (
        "\n".join(lines).replace("config=/tmp/", f"config={where}/").replace("sleep 5", "sleep 0.1")
    )
    return commands_of(script, where, {"REDIS_URL": "redis://:pw@there:6379/0"})


def test_every_pod_calls_a_command_on_a_config_that_loads(
    job: dict[str, Any], tmp_path: Path
) -> None:
    for kind, text in commands(job).items():
        (words,) = calls_of(text, tmp_path / kind)
        name = check_command(words)
        config = load_config(words[2])
        assert Path(words[2]).stat().st_mode & 0o77 == 0
        assert config.rest.port == 8000
        assert ("pw@" in str(config.redis.url)) == ("REDIS_URL" in text)
        assert "pw@" not in " ".join(words)
        if job["JobType"] == "PyTorchJob":
            assert (name, config.fleet.provider) == ("node", "local")
            continue
        assert config.fleet.provider == "none", "its pods are the workers"
        if kind == "Controller":
            assert name == "node" and words[-1].endswith(f":{config.controller.port or 7000}")
            continue
        assert name == kind.partition("-")[0].lower()
        assert "10.0.0.7:7000,10.0.0.7:7001" in words
        if kind.startswith("Scorer"):
            assert words[words.index("--scorer") + 1] == "reference"


def test_a_request_that_the_service_would_refuse_is_refused_here(tmp_path: Path) -> None:
    long = tmp_path / "long.toml"
    long.write_text(CPU.read_text() + "\n[metrics]\nproject = '" + "x" * 20_000 + "'\n")
    done = CliRunner().invoke(app, ["render", str(long), "--target", "pai-dlc", *NEEDED])
    assert isinstance(done.exception, BadInput)
    assert "and PAI-DLC takes 65536" in str(done.exception)


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
    write_job(run, NodeJob("s", "demo", 1, 0, {}, "d", ("10.0.0.7:7000",)))
    (run / "token").write_text("of-the-run")
    job = job_of(CPU, "--volume", f"d-own:{tmp_path}", "--run-dir", str(run))
    (bin_dir := tmp_path / "bin").mkdir()
    (bin_dir / "paceline").write_text(PACELINE)
    (bin_dir / "paceline").chmod(0o755)
    shorten_pauses(bin_dir)
    environment = {**base_environment(bin_dir), "RUN": str(run)}
    pod = subprocess.Popen(["bash", "-c", commands(job)["Rollout"]], env=environment, cwd=tmp_path)
    try:
        while not (run / "started").exists():
            assert pod.poll() is None
            time.sleep(0.05)
        pod.terminate()
        assert pod.wait(60) == 0
    finally:
        pod.kill()
    assert (run / "drained").read_text().strip() == "of-the-run"


def test_a_pod_is_given_the_time_that_its_drain_takes() -> None:
    long = job_of(CPU, "--set", "fleet.drain_s=3600")
    assert long["Settings"]["TerminationGracePeriodSeconds"] >= 3600 + 60
