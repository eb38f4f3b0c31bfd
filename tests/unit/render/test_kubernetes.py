"""Kubernetes manifests and a PyTorchJob: they agree with the run, and the commands of their pods
exist. Golden files show the rest of them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.providers.kubernetes import KubernetesProvider
from paceline.redis.users import CONTROLLER, RULES
from paceline.worker_pools import desired_workers
from paceline_launcher.cli import app
from tests.fixtures.rendered import (
    CPU,
    IMAGE,
    OWN_REDIS,
    check_command,
    commands_of,
    documents,
    expanded,
    of_kind,
    render,
)

Manifests = list[dict[str, Any]]
VARIANTS: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "own redis": OWN_REDIS,
    "deployments": ("--set", "kubernetes.rollout=deployment/generators"),
}


@pytest.fixture(scope="module", params=VARIANTS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return documents(render(CPU, "kubernetes", "--image", IMAGE, *VARIANTS[request.param]))


@pytest.fixture(scope="module")
def small() -> Manifests:
    return documents(render(CPU, "kubernetes", "--image", IMAGE))


def run_file(manifests: Manifests, directory: Path) -> Path:
    """The run's configuration, as pods see it in ``directory``."""
    directory.mkdir(exist_ok=True)
    path = directory / "run.toml"
    path.write_text(one_of(manifests, "ConfigMap")["data"]["run.toml"])
    return path


def one_of(manifests: Manifests, kind: str) -> dict[str, Any]:
    (found,) = of_kind(manifests, kind).values()
    return found


def pods(manifests: Manifests) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name of the container, pod spec, container)."""
    for one in manifests:
        if one["kind"] in ("StatefulSet", "Deployment", "Job"):
            spec = one["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            yield container["name"], spec, container


def test_the_leader_may_scale_exactly_the_workloads_that_the_config_names(
    manifests: Manifests, tmp_path: Path
) -> None:
    config = load_config(run_file(manifests, tmp_path))
    assert config.fleet.provider == "kubernetes"
    provider = KubernetesProvider(config.kubernetes)
    named = [provider.workload(pool) for pool in desired_workers(config)]
    rules = one_of(manifests, "Role")["rules"]
    assert all(rule["verbs"] == ["get", "patch"] for rule in rules)
    allowed = [
        f"{rule['resources'][0].removesuffix('s/scale')}/{name}"
        for rule in rules
        for name in rule["resourceNames"]
    ]
    assert sorted(allowed) == sorted(named)


def values_of(container: dict[str, Any]) -> dict[str, str]:
    """Environment of the container as Kubernetes would set it, with made-up secrets."""
    found = {}
    for variable in container["env"]:
        key = variable.get("valueFrom", {}).get("secretKeyRef", {}).get("key", "")
        secret = "redis://:from-secret@there:6379/0" if "url" in key else "from-secret"
        found[variable["name"]] = secret if key else variable.get("value", "pod-1")
    return found


def called(manifests: Manifests, tmp_path: Path) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    """(container, words of its call, container), by running what the pod would run, with a /tmp of
    its own in ``tmp_path``."""
    run_file(manifests, config := tmp_path / "etc")
    for name, _, container in pods(manifests):
        (own := tmp_path / name).mkdir(exist_ok=True)
        values, arguments = values_of(container), container["args"]
        if container["command"][-1] == "paceline":
            yield name, ["paceline", *(expanded(a, values) for a in arguments)], container
        else:
            (script,) = arguments
            script = script.replace("/tmp/", f"{own}/").replace("/etc/paceline", str(config))
            script = re.sub(r'exec "\$\(python .*?\)"', "exec valkey-server", script)
            (words,) = commands_of(script, own, {**values, "HOSTNAME": "demo-controller-1"})
            yield name, words, container
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook is not None:
            (words,) = commands_of(hook[-1], own, values)
            yield "preStop", words, container


def test_commands_exist_know_the_controllers_and_show_no_secret(
    manifests: Manifests, tmp_path: Path
) -> None:
    assert "hidden" not in str(manifests), "the password of a server of one's own"
    config = load_config(run_file(manifests, tmp_path))
    (controllers,) = (
        one
        for name, one in of_kind(manifests, "StatefulSet").items()
        if name.endswith("-controller")
    )
    assert controllers["spec"]["replicas"] == config.fleet.controllers
    name, host = controllers["metadata"]["name"], controllers["spec"]["serviceName"]
    addresses = ",".join(
        f"{name}-{index}.{host}:{config.controller.port}"
        for index in range(config.fleet.controllers)
    )
    seen = []
    for container, words, spec in called(manifests, tmp_path):
        assert "from-secret" not in " ".join(words), words
        assert spec["image"] == IMAGE
        if container == "redis":
            continue
        seen.append(check_command(words))
        assert f"--controllers {addresses}" in " ".join(words).replace("=", " ")
        assert "PACELINE_TOKEN" in values_of(spec), "0.0.0.0 is refused without a token"
        assert container != "scorer" or "--scorer=reference" in words
        if container in ("controller", "end"):
            check_private_config(words, of_kind(manifests, "Service"))
    roles = {role.partition(":")[0] for role in desired_workers(config)}
    assert set(seen) == {"controller", "wait", "drain", *roles}


def check_private_config(words: list[str], services: dict[str, Any]) -> None:
    """The config of a controller has the address of Redis, in a private file."""
    assert Path(words[2]).stat().st_mode & 0o77 == 0
    config = load_config(words[2], [w for w in words if w.startswith("rest.port=")])
    assert config.redis.url is not None and ":from-secret@" in config.redis.url
    if "demo-redis" in services:
        port = services["demo-redis"]["spec"]["ports"][0]["port"]
        assert config.redis.url.endswith(f"@demo-redis:{port}/0")
    if words[1] == "controller":
        # The second controller adds 1 to it.
        (rest,) = services[f"{config.run.name}-rest"]["spec"]["ports"]
        assert config.rest.port + 1 == rest["port"]


def test_no_pod_has_more_rights_than_it_needs(small: Manifests) -> None:
    """The profile "restricted" of Kubernetes, which the namespace enforces."""
    labels = one_of(small, "Namespace")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod, container in pods(small):
        own = pod["securityContext"]
        assert own["runAsNonRoot"] is True and own["runAsUser"] > 0, name
        assert own["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        assert not any("hostPath" in volume for volume in pod.get("volumes", [])), name
        # The API server hears the leader alone.
        assert pod.get("automountServiceAccountToken", True) == (name == "controller"), name


def test_redis_lets_nobody_command_it(small: Manifests, tmp_path: Path) -> None:
    ((words, container),) = [(w, c) for name, w, c in called(small, tmp_path) if name == "redis"]
    assert values_of(container)["RULES"] == RULES[CONTROLLER]
    path = tmp_path / "redis" / "redis.conf"
    assert words[1] == str(path)
    assert path.read_text() == f"user default on >from-secret resetchannels {RULES[CONTROLLER]}\n"


@pytest.mark.parametrize("options", [(), OWN_REDIS])
def test_nodes_of_a_pytorchjob_share_the_fleet_as_paceline_node_places_it(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    """The operator sets the environment: every worker of [fleet] is on one of the nodes."""
    files = documents(render(CPU, "pytorchjob", "--image", IMAGE, "--nodes", "2", *options))
    run_file(files, tmp_path)
    replicas = one_of(files, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    first, second = (each["template"]["spec"]["containers"][0] for each in replicas.values())
    assert (first["command"], first["args"]) == (second["command"], second["args"])
    words = ["paceline", *first["args"]]
    if options:
        script = first["args"][0].replace("/tmp/", f"{tmp_path}/private-")
        script = script.replace("/etc/paceline", str(tmp_path))
        (words,) = commands_of(script, tmp_path, {"REDIS_URL": "redis://:pw@there:6379/0"})
        assert Path(words[2]).stat().st_mode & 0o77 == 0
        assert load_config(words[2]).redis.url == "redis://:pw@there:6379/0"
    words = [word.replace("/etc/paceline", str(tmp_path)) for word in words]
    config: Config = load_config(words[2])
    assert config.fleet.provider == "local", "paceline node starts the workers"
    assert config.rest.host == "0.0.0.0" and config.rest.port == 8000
    started: list[str] = []
    for rank in ("0", "1"):
        environment = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "23456"}
        done = CliRunner().invoke(app, [*words[1:], "--dry-run", "--json"], env=environment)
        assert done.exit_code == 0, done.output
        started += json.loads(done.stdout)["workers"]
    assert sorted(started) == ["policy-0", "rollout-0", "rollout-1", "scorer-reference-0"]
