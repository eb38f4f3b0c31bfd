"""PyTorchJob: fields of the custom resource, pods that follow the schema, and the command of every
node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from paceline.config.load import load_config
from paceline.errors import BadInput
from paceline_launcher.cli import app
from tests.fixtures.rendered import (
    EXAMPLES,
    IMAGE,
    check_command,
    commands_of,
    documents,
    of_kind,
    render,
)

CPU, GPU = EXAMPLES / "digit_sort.toml", EXAMPLES / "qwen3_8b.toml"
LARGE = (
    *("--gpus-per-node", "8", "--volume", "data:/mnt/data", "--nccl-env", "NCCL_IB_HCA=mlx5"),
    *("--rdma", "rdma/hca=8", "--host-network", "--scheduler", "volcano"),
)
VARIANTS: dict[str, tuple[Any, ...]] = {
    "cpu": (CPU, "--nodes", "2"),
    "one node": (CPU,),
    "gpu": (GPU, *LARGE),
    "own redis": (CPU, "--nodes", "2", "--set", "redis.url=redis://:hidden@here:6379/0"),
}
# Fields of kubeflow.org/v1 PyTorchJob.
SPEC = {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
RUN_POLICY = {
    *("activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy"),
    *("suspend", "ttlSecondsAfterFinished"),
}
REPLICA = {"replicas", "restartPolicy", "template"}
RESTART = {"Always", "OnFailure", "Never", "ExitCode"}
CLEAN = {"All", "Running", "None"}


@pytest.fixture(scope="module", params=VARIANTS)
def rendered(request: pytest.FixtureRequest) -> dict[str, str]:
    config, *options = VARIANTS[request.param]
    return render(config, "pytorchjob", "--image", IMAGE, *options)


def job_of(files: dict[str, str]) -> dict[str, Any]:
    (job,) = of_kind(documents(files), "PyTorchJob").values()
    return job


def containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    replicas = job["spec"]["pytorchReplicaSpecs"].values()
    return [one for each in replicas for one in each["template"]["spec"]["containers"]]


def test_the_job_has_the_fields_of_its_resource(rendered: dict[str, str]) -> None:
    job = job_of(rendered)
    assert job["apiVersion"] == "kubeflow.org/v1"
    assert set(job["spec"]) <= SPEC
    assert set(job["spec"]["runPolicy"]) <= RUN_POLICY
    assert job["spec"]["runPolicy"]["cleanPodPolicy"] in CLEAN
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {"Master"} <= set(replicas) <= {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for each in replicas.values():
        assert set(each) == REPLICA
        assert each["restartPolicy"] in RESTART
        # The operator finds its container, and node 0's port, by their names.
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"
        assert {"name": "pytorchjob-port", "containerPort": 23456} in container["ports"]


@pytest.mark.parametrize("version", ["1.31", "1.36"])
def test_pods_and_other_manifests_follow_the_schema(rendered: dict[str, str], version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for one in documents(rendered):
        if one["kind"] != "PyTorchJob":
            kubernetes_validate.validate(one, version, strict=True)
            continue
        for each in one["spec"]["pytorchReplicaSpecs"].values():
            pod = {"apiVersion": "v1", "kind": "Pod", **each["template"]}
            kubernetes_validate.validate(pod, version, strict=True)


def test_selectors_meet_pods_and_references_exist(rendered: dict[str, str]) -> None:
    manifests, job = documents(rendered), job_of(rendered)
    replicas = job["spec"]["pytorchReplicaSpecs"]
    master = replicas["Master"]["template"]["metadata"]["labels"]
    (service,) = of_kind(manifests, "Service").values()
    assert service["spec"]["selector"] == master
    ports = {port["name"]: port["containerPort"] for port in containers(job)[0]["ports"]}
    assert service["spec"]["ports"][0]["port"] == ports["rest"]
    (budget,) = of_kind(manifests, "PodDisruptionBudget").values()
    for each in replicas.values():
        labels = each["template"]["metadata"]["labels"].items()
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels
        spec = each["template"]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} == set(volumes)
        assert volumes["config"]["configMap"]["name"] in of_kind(manifests, "ConfigMap")
        claim = volumes["runs"]["persistentVolumeClaim"]["claimName"]
        assert claim in of_kind(manifests, "PersistentVolumeClaim")
    listed = yaml.safe_load(rendered["kustomization.yaml"])["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(rendered)
    # Pods with their nodes' addresses are outside any NetworkPolicy.
    on_host = replicas["Master"]["template"]["spec"].get("hostNetwork", False)
    assert on_host == (not of_kind(manifests, "NetworkPolicy"))


def command_of(rendered: dict[str, str], tmp_path: Path) -> list[str]:
    """What every node runs, with the config in a file of this machine."""
    (one,) = of_kind(documents(rendered), "ConfigMap").values()
    (tmp_path / "run.toml").write_text(one["data"]["run.toml"])
    own = containers(job_of(rendered))
    assert all((c["command"], c["args"]) == (own[0]["command"], own[0]["args"]) for c in own)
    if own[0]["command"][-1] == "paceline":
        words = ["paceline", *own[0]["args"]]
        return [word.replace("/etc/paceline", str(tmp_path)) for word in words]
    (script,) = own[0]["args"]
    script = script.replace("/tmp/", f"{tmp_path}/private-")
    script = script.replace("/etc/paceline", str(tmp_path))
    (words,) = commands_of(script, tmp_path, {"REDIS_URL": "redis://:pw@there:6379/0"})
    return words


def test_every_node_runs_the_same_command_on_a_config_that_loads(
    rendered: dict[str, str], tmp_path: Path
) -> None:
    words = command_of(rendered, tmp_path)
    assert words[:2] == ["paceline", "node"]
    config = load_config(words[2])
    assert config.fleet.provider == "local", "paceline node starts the workers"
    assert config.rest.host == "0.0.0.0" and config.rest.port == 8000
    assert "hidden" not in str(rendered)
    if "private" in words[2]:
        assert config.redis.url == "redis://:pw@there:6379/0"
        assert Path(words[2]).stat().st_mode & 0o77 == 0


def test_the_command_line_takes_the_nodes_command(rendered: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("paceline_launcher.cli.control.node")
    assert check_command(command_of(rendered, tmp_path)) == "node"


def test_nodes_of_the_job_share_the_fleet_as_paceline_node_places_it(tmp_path: Path) -> None:
    """With the environment that the operator sets: every worker of [fleet] is on one of the nodes."""
    pytest.importorskip("paceline_launcher.cli.control.node")
    words = command_of(render(CPU, "pytorchjob", "--image", IMAGE, "--nodes", "2"), tmp_path)
    started: list[str] = []
    for rank in ("0", "1"):
        environment = {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "m-0",
            "MASTER_PORT": "23456",
        }
        done = CliRunner().invoke(app, [*words[1:], "--dry-run", "--json"], env=environment)
        assert done.exit_code == 0, done.output
        started += json.loads(done.stdout)["workers"]
    assert sorted(started) == ["policy-0", "rollout-0", "rollout-1", "scorer-reference-0"]


def test_gpus_devices_and_network_are_those_of_the_options() -> None:
    job = job_of(render(GPU, "pytorchjob", "--image", IMAGE, *LARGE))
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert replicas["Worker"]["replicas"] == 1, "8 GPUs train, 8 generate"
    for each in replicas.values():
        spec = each["template"]["spec"]
        (container,) = spec["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 8}
        assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert spec["hostNetwork"] is True and spec["dnsPolicy"] == "ClusterFirstWithHostNet"
        assert spec["schedulerName"] == "volcano"
        assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in container["env"]


@pytest.mark.parametrize(
    ("gpus", "ranks", "shards", "nodes"),
    [(8, 8, 1, 2), (8, 5, 3, 3), (4, 4, 4, 9), (16, 8, 1, 1), (8, 16, 1, 3), (8, 12, 1, 3)],
)
def test_the_nodes_are_as_many_as_the_workers_need(
    gpus: int, ranks: int, shards: int, nodes: int
) -> None:
    settings = ("--set", f"fleet.policy_ranks={ranks}", "--set", f"rollout.tensor_parallel={shards}")  # fmt: skip
    fleet = ("--set", "fleet.rollout=8" if shards != 3 else "fleet.rollout=5")
    words = ("--image", IMAGE, "--gpus-per-node", str(gpus), *settings, *fleet)
    replicas = job_of(render(GPU, "pytorchjob", *words))["spec"]["pytorchReplicaSpecs"]
    assert sum(each["replicas"] for each in replicas.values()) == nodes


def test_too_few_nodes_are_refused_with_the_number_that_is_needed() -> None:
    words = ["render", str(GPU), "--target", "pytorchjob", "--image", IMAGE, "--gpus-per-node", "8"]
    done = CliRunner().invoke(app, [*words, "--nodes", "1", "--dry-run"])
    assert isinstance(done.exception, BadInput)
    assert "Give --nodes 2" in str(done.exception)
