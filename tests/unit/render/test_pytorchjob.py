"""PyTorchJob: names by which the operator finds things, and the command of every node."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.config.load import load_config
from paceline_launcher.cli import app
from tests.fixtures.rendered import EXAMPLES, IMAGE, commands_of, documents, of_kind, render

CPU, GPU = EXAMPLES / "digit_sort.toml", EXAMPLES / "qwen3_8b.toml"


def job_of(files: dict[str, str]) -> dict[str, Any]:
    (job,) = of_kind(documents(files), "PyTorchJob").values()
    return job


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    return [one for each in replicas for one in each["template"]["spec"]["containers"]]


def test_the_operator_finds_its_container_and_the_service_its_pod() -> None:
    files = render(CPU, "pytorchjob", "--image", IMAGE, "--nodes", "2")
    job = job_of(files)
    for container in containers(job):
        assert container["name"] == "pytorch"
        assert {"name": "pytorchjob-port", "containerPort": 23456} in container["ports"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    master = replicas["Master"]["template"]["metadata"]["labels"]
    (service,) = of_kind(documents(files), "Service").values()
    assert service["spec"]["selector"] == master
    (budget,) = of_kind(documents(files), "PodDisruptionBudget").values()
    assert budget["spec"]["selector"]["matchLabels"].items() <= master.items()


@pytest.mark.parametrize("options", [(), ("--set", "redis.url=redis://:hidden@here:6379/0")])
def test_nodes_of_the_job_share_the_fleet_as_paceline_node_places_it(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """The operator sets the environment: every worker of [fleet] is on one of the
    nodes."""
    files = render(CPU, "pytorchjob", "--image", IMAGE, "--nodes", "2", *options)
    (config_map,) = of_kind(documents(files), "ConfigMap").values()
    (tmp_path / "run.toml").write_text(config_map["data"]["run.toml"])
    first, second = containers(job_of(files))
    assert (first["command"], first["args"]) == (second["command"], second["args"])
    words = ["paceline", *first["args"]]
    if first["command"][-1] != "paceline":
        script = first["args"][0].replace("/tmp/", f"{tmp_path}/private-")
        script = script.replace("/etc/paceline", str(tmp_path))
        (words,) = commands_of(script, tmp_path, {"REDIS_URL": "redis://:pw@there:6379/0"})
        assert Path(words[2]).stat().st_mode & 0o77 == 0
        assert load_config(words[2]).redis.url == "redis://:pw@there:6379/0"
    words = [word.replace("/etc/paceline", str(tmp_path)) for word in words]
    config = load_config(words[2])
    assert config.fleet.provider == "local", "paceline node starts the workers"
    assert config.rest.host == "0.0.0.0" and config.rest.port == 8000
    started: list[str] = []
    for rank in ("0", "1"):
        environment = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "23456"}
        done = CliRunner().invoke(app, [*words[1:], "--dry-run", "--json"], env=environment)
        assert done.exit_code == 0, done.output
        started += json.loads(done.stdout)["workers"]
    assert sorted(started) == ["policy-0", "rollout-0", "rollout-1", "scorer-reference-0"]
