"""Files under deploy/: they parse, refer to what exists, and call commands that exist."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli import app
from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.providers.kubernetes import KubernetesProvider
from paceline.redis.users import CONTROLLER, RULES
from paceline.worker_pools import desired_workers

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
VERSIONS = {
    "ConfigMap": "v1",
    "Namespace": "v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PersistentVolumeClaim": "v1",
    "Service": "v1",
    "ServiceAccount": "v1",
    "StatefulSet": "apps/v1",
    "Role": "rbac.authorization.k8s.io/v1",
    "RoleBinding": "rbac.authorization.k8s.io/v1",
}
SECRET_KEYS = {"token", "redis-password"}


def manifests() -> list[dict[str, Any]]:
    listed = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]
    on_disk = {p.name for p in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == on_disk
    texts = [(DEPLOY / "kubernetes" / name).read_text() for name in listed]
    return [one for text in texts for one in yaml.safe_load_all(text)]


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {m["metadata"]["name"]: m for m in manifests() if m["kind"] == kind}


def run_config(tmp_path: Path) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(of_kind("ConfigMap")["paceline-config"]["data"]["run.toml"])
    return load_config(path)


def pods() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(workload, pod spec, container)."""
    for name, one in of_kind("StatefulSet").items():
        spec = one["spec"]["template"]["spec"]
        for container in spec["containers"]:
            yield name, spec, container


def calls(text: str) -> list[list[str]]:
    """Words of every call of ``paceline`` in a shell text."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"(?:^|[\s'])paceline ((?:[^|&;'\n]|'[^']*')+)", joined, re.MULTILINE)
    return [shlex.split(words) for words in found]


def check_call(words: list[str]) -> None:
    """The command exists, takes these options, and gets its arguments."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name = words[0]
    if name.startswith("$"):
        name = "rollout"
    assert name in commands, f"there is no command {name!r}"
    options = {o: p for p in commands[name].params for o in p.opts if o.startswith("-")}
    index = 1
    while index < len(words):
        word = words[index]
        if word.startswith("--"):
            option, equals, _ = word.partition("=")
            assert option in options, f"paceline {name} has no {option}"
            index += 0 if equals or options[option].is_flag else 1
        index += 1


def test_every_manifest_is_of_a_known_kind_and_its_selectors_meet_its_labels() -> None:
    services = of_kind("Service")
    for one in manifests():
        assert one["apiVersion"] == VERSIONS[one["kind"]], one["metadata"]["name"]
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])
    for name, one in of_kind("StatefulSet").items():
        spec = one["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        assert services[spec["serviceName"]]["spec"]["selector"] == labels, name


def test_volumes_secrets_and_accounts_that_are_referred_to_exist() -> None:
    for name, spec, container in pods():
        volumes = {v["name"]: v for v in spec.get("volumes", [])}
        claims = of_kind("StatefulSet")[name]["spec"].get("volumeClaimTemplates", [])
        known = volumes.keys() | {c["metadata"]["name"] for c in claims}
        assert {m["name"] for m in container.get("volumeMounts", [])} <= known
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind("ConfigMap")
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in of_kind("PersistentVolumeClaim")
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                assert reference["name"] == "paceline"
                assert reference["key"] in SECRET_KEYS
        if "serviceAccountName" in spec:
            assert spec["serviceAccountName"] in of_kind("ServiceAccount")
    readme = (DEPLOY / "kubernetes/README.md").read_text()
    assert all(f" > secret/{key}\n" in readme for key in SECRET_KEYS)
    assert "--from-file=secret\n" in readme and "--from-literal" not in readme, (
        "a value on kubectl's command line"
    )


def test_the_leader_may_scale_exactly_the_workloads_that_the_config_names(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    assert config.fleet.provider == "kubernetes"
    provider = KubernetesProvider(config.kubernetes)
    desired = desired_workers(config)
    named = [provider.workload(pool) for pool in desired]
    (rule,) = of_kind("Role")["paceline-scale"]["rules"]
    assert rule["verbs"] == ["get", "patch"]
    assert rule["resources"] == ["statefulsets/scale"]
    assert [f"statefulset/{name}" for name in rule["resourceNames"]] == named
    stateful = of_kind("StatefulSet")
    assert len(desired) == 3, "policy, rollout and a scorer"
    for workload, count in zip(named, desired.values(), strict=True):
        assert stateful[workload.partition("/")[2]]["spec"]["replicas"] == count
    binding = of_kind("RoleBinding")["paceline-scale"]
    (subject,) = binding["subjects"]
    account = stateful["paceline-controller"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert subject["name"] == account


def test_every_scorer_of_the_config_has_workers_that_know_its_name(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    calls = [words for _, _, one in pods() if (words := one.get("args", []))[:1] == ["scorer"]]
    told = [word for words in calls for word in words if word.startswith("--scorer=")]
    assert told == [f"--scorer={name}" for name in config.scorers.by_name]


def test_every_process_knows_all_controllers_by_addresses_that_exist(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    controllers = of_kind("StatefulSet")["paceline-controller"]["spec"]
    assert controllers["replicas"] == config.fleet.controllers
    expected = ",".join(
        f"paceline-controller-{index}.{controllers['serviceName']}:{config.controller.port}"
        for index in range(config.fleet.controllers)
    )
    for name, _, container in pods():
        values = {v["name"]: v.get("value") for v in container.get("env", [])}
        if name != "paceline-redis":
            assert values["CONTROLLERS"] == expected, name
            assert "PACELINE_TOKEN" in values, "0.0.0.0 is refused without a token"


def test_no_secret_is_on_a_command_line_and_no_image_moves() -> None:
    for name, _, container in pods():
        secrets = {v["name"] for v in container["env"] if "secretKeyRef" in v.get("valueFrom", {})}
        for line in "\n".join(container.get("args", [])).splitlines():
            # printf is a builtin of the shell: no process gets its arguments.
            builtin = line.startswith("printf ") or "; printf " in line
            assert builtin or not any(secret in line for secret in secrets), (name, line)
        if container["image"] != "paceline":
            assert re.fullmatch(r"\S+:\d+\.\d+\.\d+\S*", container["image"]), name
    (image,) = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["images"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", image["newTag"])
    base = re.findall(r"^FROM (\S+)", (DEPLOY / "containers/Dockerfile").read_text(), re.MULTILINE)
    assert all(re.fullmatch(r"\S+:\d+\.\d+\.\d+\S*", one) for one in base)
    for script in (DEPLOY / "slurm").glob("*.sbatch"):
        assert not re.search(
            r"--(set|requirepass)\S* .*\$(password|PACELINE_TOKEN)", script.read_text()
        )


def test_no_pod_has_more_rights_than_it_needs() -> None:
    """The profile "restricted" of Kubernetes, which the namespace enforces."""
    labels = of_kind("Namespace")["paceline"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod, container in pods():
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        assert not any("hostPath" in volume for volume in pod.get("volumes", [])), name
        # The API server hears the leader alone.
        mounts = pod.get("automountServiceAccountToken", True)
        assert mounts == (name == "paceline-controller"), name


def test_redis_lets_nobody_command_it() -> None:
    (values,) = (c["env"] for name, _, c in pods() if name == "paceline-redis")
    assert {"name": "RULES", "value": RULES[CONTROLLER]} in values
    (policy,) = of_kind("NetworkPolicy").values()
    assert policy["spec"]["podSelector"] == {}, "every pod"
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {}}]}], "from this namespace"


def test_pods_leave_gracefully_before_they_are_ended() -> None:
    others = ("paceline-redis", "paceline-controller")
    workers = [(s, c) for name, s, c in pods() if name not in others]
    assert len(workers) == 3
    for spec, container in workers:
        farewell = container["lifecycle"]["preStop"]["exec"]["command"][-1]
        wait_s = float(re.findall(r"--wait (\d+)", farewell)[0])
        assert "--replace" in farewell, "the provider has lowered the desired count already"
        assert spec["terminationGracePeriodSeconds"] > wait_s + 15


def test_commands_in_manifests_exist() -> None:
    found = []
    for _, _, container in pods():
        command, arguments = container.get("command", []), container.get("args", [])
        if command[-1:] == ["paceline"]:
            found.append(arguments)
        for text in (*arguments, *container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])):  # fmt: skip
            found += calls(text)
    assert {words[0] for words in found} == {"controller", "policy", "rollout", "scorer", "drain"}
    for words in found:
        check_call(words)


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("slurm/*.sbatch")), ids=lambda p: p.name)
def test_batch_scripts_parse_and_call_commands_that_exist(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    found = calls(path.read_text())
    assert found
    for words in found:
        check_call(words)
    for line in re.findall(r"^#SBATCH (.*)$", path.read_text(), re.MULTILINE):
        assert re.match(r"--[a-z-]+(=\S+)?$", line), line


@pytest.mark.parametrize("path", ["kubernetes/README.md", "../docs/elasticity.md"])
def test_commands_in_the_instructions_exist(path: str) -> None:
    text = (DEPLOY / path).read_text().replace("`", "\n")
    # The namespace and the secret have the command's name.
    for words in calls(text.replace("-n paceline", "").replace("generic paceline", "")):
        check_call(words)


def test_the_image_has_what_it_copies_and_ends_on_sigterm() -> None:
    text = (DEPLOY / "containers/Dockerfile").read_text()
    root = DEPLOY.parent
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((root / source).exists() for source in sources), line
    assert 'ENTRYPOINT ["tini", "--", "paceline"]' in text
    assert re.search(r"^USER 1000$", text, re.MULTILINE)
    packages = {"paceline", "controller", "policy_worker", "rollout_worker", "scorer_worker"}
    assert packages <= set(re.findall(r"^COPY (\w+) ", text, re.MULTILINE))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_it() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    built = [one for one in yaml.safe_load_all(done.stdout) if one]
    assert len(built) == len(manifests())
    assert {m["metadata"].get("namespace") for m in built if m["kind"] != "Namespace"} == {
        "paceline"
    }
