"""The manifest that serves an export: valid for Kubernetes, protected, and calling a command that
exists."""

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline_launcher.cli import app
from paceline_launcher.vllm_server import OPEN_PATHS

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
MANIFESTS: dict[str, Any] = {
    one["kind"]: one
    for one in yaml.safe_load_all((DEPLOY / "serving" / "serving.yaml").read_text())
}
POD = MANIFESTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.mark.parametrize("kind", MANIFESTS)
def test_kubernetes_accepts_it(kind: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(MANIFESTS[kind], validator.latest_version(), strict=True)


def test_service_and_policy_meet_the_pods_label_and_port() -> None:
    labels, (port,) = POD["metadata"]["labels"], CONTAINER["ports"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    service, policy = MANIFESTS["Service"]["spec"], MANIFESTS["NetworkPolicy"]["spec"]
    assert service["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert [one["targetPort"] for one in service["ports"]] == [port["name"]]
    assert [p["port"] for rule in policy["ingress"] for p in rule["ports"]] == [port["name"]]
    assert f"--port={port['containerPort']}" in CONTAINER["args"]


def test_probes_ask_a_path_that_needs_no_key() -> None:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = CONTAINER[probe]["httpGet"]
        assert asked["path"] in OPEN_PATHS and asked["port"] == CONTAINER["ports"][0]["name"]


def test_the_command_exists_and_its_key_comes_from_the_secret_of_the_instructions() -> None:
    name, source, *options = CONTAINER["args"]
    known = {o for p in typer.main.get_command(app).commands[name].params for o in p.opts}  # type: ignore[attr-defined]
    given = dict(option.split("=") for option in options)
    assert given.keys() <= known and source.startswith("/runs/")
    (variable,) = CONTAINER["env"]
    assert given["--api-key-env"] == variable["name"]
    secret = variable["valueFrom"]["secretKeyRef"]
    instructions = (DEPLOY / "serving" / "README.md").read_text()
    assert f"secret generic {secret['name']} --from-file=secret\n" in instructions
    assert f"> secret/{secret['key']}\n" in instructions


def test_it_has_no_more_rights_than_a_worker() -> None:
    pod, own = POD["spec"], CONTAINER["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    mounts = {m["name"]: m for m in CONTAINER["volumeMounts"]}
    assert mounts["runs"]["readOnly"] is True
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert re.fullmatch(r"\S+:\d+\.\d+\.\d+", CONTAINER["image"]), "an image that does not move"
