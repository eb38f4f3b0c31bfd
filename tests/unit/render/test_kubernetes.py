"""Kubernetes manifests: they agree with one another and with the run, and their commands exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.providers.kubernetes import KubernetesProvider
from paceline.redis.users import CONTROLLER, RULES
from paceline.worker_pools import desired_workers
from tests.fixtures.rendered import (
    EXAMPLES,
    IMAGE,
    check_command,
    commands_of,
    documents,
    expanded,
    of_kind,
    render,
)

Manifests = list[dict[str, Any]]
CPU = EXAMPLES / "digit_sort.toml"


@pytest.fixture(scope="module", params=["cpu", "own redis", "deployments", "tls"])
def rendered(request: pytest.FixtureRequest) -> dict[str, str]:
    options = {
        "cpu": (CPU,),
        "own redis": (CPU, "--set", "redis.url=redis://:hidden@here:6379/0"),
        "deployments": (CPU, "--set", "kubernetes.rollout=deployment/generators"),
        "tls": (CPU, "--set", "auth.tls_cert=/c.pem", "--set", "auth.tls_key=/k.pem"),
    }[request.param]
    return render(options[0], "kubernetes", "--image", IMAGE, *options[1:])


@pytest.fixture(scope="module")
def manifests(rendered: dict[str, str]) -> Manifests:
    return documents(rendered)


@pytest.fixture(scope="module")
def small() -> Manifests:
    return documents(render(CPU, "kubernetes", "--image", IMAGE))


def run_config(manifests: Manifests, tmp_path: Path) -> Config:
    (one,) = of_kind(manifests, "ConfigMap").values()
    path = tmp_path / "run.toml"
    path.write_text(one["data"]["run.toml"])
    return load_config(path)


def pods(manifests: Manifests) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(workload, pod spec, container)."""
    for one in manifests:
        if one["kind"] in ("StatefulSet", "Deployment", "Job"):
            spec = one["spec"]["template"]["spec"]
            yield one["metadata"]["name"], spec, spec["containers"][0]
            assert len(spec["containers"]) == 1


def workers(manifests: Manifests) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    names = ("policy", "rollout", "scorer")
    return [one for one in pods(manifests) if one[2]["name"] in names]


def test_names_are_labels_and_selectors_meet_the_labels(manifests: Manifests) -> None:
    services = of_kind(manifests, "Service")
    for one in manifests:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", one["metadata"]["name"])
    found = []
    for one in manifests:
        if one["kind"] in ("StatefulSet", "Deployment"):
            spec, name = one["spec"], one["metadata"]["name"]
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"] == labels
            found.append(labels)
            if one["kind"] == "StatefulSet":
                assert services[spec["serviceName"]]["spec"]["selector"] == labels, name
    budgets = of_kind(manifests, "PodDisruptionBudget").values()
    for budget in budgets:
        assert budget["spec"]["selector"]["matchLabels"] in found
    assert len(list(budgets)) == len(
        [x for x in found if x["app.kubernetes.io/component"] != "redis"]
    )


def test_volumes_secrets_and_accounts_that_are_referred_to_exist(
    rendered: dict[str, str], manifests: Manifests
) -> None:
    keys = set()
    for name, spec, container in pods(manifests):
        volumes = {v["name"]: v for v in spec.get("volumes", [])}
        workload = next(
            m
            for m in manifests
            if m["metadata"]["name"] == name and "spec" in m and "template" in m["spec"]
        )
        claims = workload["spec"].get("volumeClaimTemplates", [])
        known = volumes.keys() | {c["metadata"]["name"] for c in claims}
        assert {m["name"] for m in container.get("volumeMounts", [])} == known
        for volume in volumes.values():
            if "configMap" in volume:
                assert volume["configMap"]["name"] in of_kind(manifests, "ConfigMap")
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in of_kind(manifests, "PersistentVolumeClaim")
        for variable in container["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                assert reference["name"] == "paceline"
                keys |= set() if reference.get("optional") else {reference["key"]}
        if "serviceAccountName" in spec:
            assert spec["serviceAccountName"] in of_kind(manifests, "ServiceAccount")
    head = rendered["kustomization.yaml"].partition("apiVersion")[0]
    named = re.findall(r"first, with ([\w, -]+):", head)[0].split(", ")
    assert set(named) == keys, "the file says which keys the secret needs"


def test_the_kustomization_names_every_file(rendered: dict[str, str]) -> None:
    listed = yaml.safe_load(rendered["kustomization.yaml"])["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(rendered)


def test_the_run_file_is_the_given_configuration(manifests: Manifests, tmp_path: Path) -> None:
    config = run_config(manifests, tmp_path)
    example = load_config(CPU)
    for section in ("run", "model", "data", "reward", "train", "objective", "rollout", "scorers"):
        assert getattr(config, section) == getattr(example, section), section
    assert config.fleet.provider == "kubernetes"
    assert config.fleet.model_copy(update={"provider": "local"}) == example.fleet


def test_the_leader_may_scale_exactly_the_workloads_that_the_config_names(
    manifests: Manifests, tmp_path: Path
) -> None:
    config = run_config(manifests, tmp_path)
    provider = KubernetesProvider(config.kubernetes)
    desired = desired_workers(config)
    named = [provider.workload(pool) for pool in desired]
    allowed = []
    (role,) = of_kind(manifests, "Role").values()
    for rule in role["rules"]:
        assert rule["verbs"] == ["get", "patch"]
        (resource,) = rule["resources"]
        kind = resource.removesuffix("s/scale")
        allowed += [f"{kind}/{name}" for name in rule["resourceNames"]]
    assert sorted(allowed) == sorted(named)
    for workload, count in zip(named, desired.values(), strict=True):
        kind, _, name = workload.partition("/")
        kinds = {"statefulset": "StatefulSet", "deployment": "Deployment"}
        assert of_kind(manifests, kinds[kind])[name]["spec"]["replicas"] == count
    (binding,) = of_kind(manifests, "RoleBinding").values()
    (subject,) = binding["subjects"]
    accounts = [pod.get("serviceAccountName") for _, pod, _ in pods(manifests)]
    assert [name for name in accounts if name] == [subject["name"]]


def values_of(container: dict[str, Any]) -> dict[str, str]:
    """Environment of the container as Kubernetes would set it, with made-up secrets."""
    found = {}
    for variable in container["env"]:
        name = variable["name"]
        secret = variable.get("valueFrom", {}).get("secretKeyRef")
        field = variable.get("valueFrom", {}).get("fieldRef")
        assert (secret is None) + (field is None) + ("value" not in variable) == 2, name
        if secret is not None:
            found[name] = (
                "redis://:from-secret@there:6379/0" if "url" in secret["key"] else "from-secret"
            )
        else:
            found[name] = variable.get("value", "pod-1")
    return found


def called(
    manifests: Manifests, tmp_path: Path
) -> Iterator[tuple[str, list[str], dict[str, Any], Path]]:
    """(container, words of its call, container, directory of its /tmp), by running what the pod
    would run."""
    config = tmp_path / "etc"
    config.mkdir()
    (one,) = of_kind(manifests, "ConfigMap").values()
    (config / "run.toml").write_text(one["data"]["run.toml"])
    for _, _, container in pods(manifests):
        own = tmp_path / container["name"]
        own.mkdir(exist_ok=True)
        values = values_of(container)
        command, arguments = container["command"], container["args"]
        if command[-1] == "paceline":
            yield (
                container["name"],
                ["paceline", *(expanded(a, values) for a in arguments)],
                container,
                own,
            )
        else:
            assert command == ["tini", "--", "sh", "-c"]
            (script,) = arguments
            script = script.replace("/tmp/", f"{own}/").replace("/etc/paceline", str(config))
            script = re.sub(r'exec "\$\(python .*?\)"', "exec valkey-server", script)
            environment = {**values, "HOSTNAME": "demo-controller-1"}
            (words,) = commands_of(script, own, environment)
            yield container["name"], words, container, own
        hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if hook is not None:
            (words,) = commands_of(hook[-1], own, values)
            yield "preStop", words, container, own


def test_commands_exist_and_know_the_controllers(manifests: Manifests, tmp_path: Path) -> None:
    config = run_config(manifests, tmp_path)
    sets = of_kind(manifests, "StatefulSet")
    (controllers,) = (one for name, one in sets.items() if name.endswith("-controller"))
    assert controllers["spec"]["replicas"] == config.fleet.controllers
    name, host = controllers["metadata"]["name"], controllers["spec"]["serviceName"]
    addresses = ",".join(
        f"{name}-{index}.{host}:{config.controller.port}"
        for index in range(config.fleet.controllers)
    )
    seen = []
    for container, words, spec, _ in called(manifests, tmp_path):
        if container == "redis":
            continue
        seen.append(check_command(words))
        joined = " ".join(words).replace("=", " ")
        assert f"--controllers {addresses}" in joined
        assert "PACELINE_TOKEN" in values_of(spec), "0.0.0.0 is refused without a token"
        if container == "scorer":
            assert "--scorer=reference" in words
    expected = {
        "controller",
        "wait",
        "drain",
        *(role.partition(":")[0] for role in desired_workers(config)),
    }
    assert set(seen) == expected


def test_the_config_of_a_controller_has_the_address_of_redis_in_a_private_file(
    manifests: Manifests, tmp_path: Path
) -> None:
    assert "hidden" not in str(manifests), "the password of a server of one's own"
    found = 0
    for container, words, _, own in called(manifests, tmp_path):
        if container in ("controller", "end"):
            path = own / "run.toml"
            assert path.stat().st_mode & 0o77 == 0
            config = load_config(words[2], [w for w in words if w.startswith("rest.port=")])
            assert config.redis.url is not None and ":from-secret@" in config.redis.url
            services = of_kind(manifests, "Service")
            if config.redis.url.startswith("redis://:from-secret@demo-redis:"):
                port = services["demo-redis"]["spec"]["ports"][0]["port"]
                assert config.redis.url.endswith(f":{port}/0")
            found += 1
            if container == "controller" and config.rest.enabled:
                # The second controller adds 1 to it.
                (rest,) = services[f"{config.run.name}-rest"]["spec"]["ports"]
                assert config.rest.port + 1 == rest["port"]
    assert found == 2


def test_no_secret_is_on_a_command_line_and_no_image_moves(
    manifests: Manifests, tmp_path: Path
) -> None:
    for _, words, container, _ in called(manifests, tmp_path):
        assert "from-secret" not in " ".join(words), words
        assert container["image"] == IMAGE


def test_no_pod_has_more_rights_than_it_needs(small: Manifests) -> None:
    """The profile "restricted" of Kubernetes, which the namespace enforces."""
    (namespace,) = of_kind(small, "Namespace").values()
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for name, pod, container in pods(small):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["runAsUser"] > 0, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}, name
        assert not any("hostPath" in volume for volume in pod.get("volumes", [])), name
        # The API server hears the leader alone.
        mounts = pod.get("automountServiceAccountToken", True)
        assert mounts == (container["name"] == "controller"), name


def test_redis_lets_nobody_command_it(small: Manifests, tmp_path: Path) -> None:
    (container,) = (one for _, _, one in pods(small) if one["name"] == "redis")
    assert values_of(container)["RULES"] == RULES[CONTROLLER]
    ((words, own),) = [(w, d) for name, w, _, d in called(small, tmp_path) if name == "redis"]
    assert (own / "redis.conf").read_text() == (
        f"user default on >from-secret resetchannels {RULES[CONTROLLER]}\n"
    )
    assert words[1] == f"{own}/redis.conf"
    (policy,) = of_kind(small, "NetworkPolicy").values()
    own_pods = {"matchLabels": {"app.kubernetes.io/part-of": "demo"}}
    assert policy["spec"]["podSelector"] == own_pods
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": own_pods}]}]


def test_pods_leave_gracefully_before_they_are_ended(manifests: Manifests) -> None:
    assert workers(manifests)
    for _, spec, container in workers(manifests):
        farewell = container["lifecycle"]["preStop"]["exec"]["command"][-1]
        wait_s = float(re.findall(r"--wait (\d+)", farewell)[0])
        assert "--replace" in farewell, "the provider has lowered the desired count already"
        assert spec["terminationGracePeriodSeconds"] > wait_s + 15
