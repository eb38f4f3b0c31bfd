"""Files under deploy/: what `make deploy` writes is there, instructions call commands that exist,
and the manifest that serves an export is valid for Kubernetes and protected."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from paceline_launcher.cli import app
from paceline_launcher.vllm_server import OPEN_PATHS

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
RENDERED = re.findall(r"^\t\$\(RENDER\) (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def calls(text: str) -> list[list[str]]:
    """Words of every call of ``paceline`` in a shell text."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"(?:^|[\s'])paceline ((?:[^|&;'\n]|'[^']*')+)", joined, re.MULTILINE)
    return [shlex.split(words) for words in found]


def check_call(words: list[str]) -> None:
    """The command exists, and takes these options."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    name = "rollout" if words[0].startswith("$") else words[0]  # a script's variable
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


@pytest.mark.parametrize("command", RENDERED, ids=lambda c: c.split()[2])
def test_examples_are_what_their_commands_render(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    folder = ROOT / words[words.index("--out") + 1]
    words[words.index("--out") + 1] = str(tmp_path)
    done = CliRunner().invoke(app, ["render", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir()}
    here = {path.name: path.read_text() for path in folder.iterdir() if path.name != "README.md"}
    assert here == fresh, "run `make deploy`"


def test_every_folder_of_rendered_files_has_its_command() -> None:
    rendered = {shlex.split(words)[-2] for words in RENDERED}
    others = {f"deploy/{name}" for name in ("containers", "examples", "grafana", "serving")}
    folders = {path.relative_to(ROOT).as_posix() for path in DEPLOY.iterdir() if path.is_dir()}
    assert folders - others == rendered


@pytest.mark.parametrize("path", ["../docs/clusters.md", "../docs/elasticity.md"])
def test_commands_in_the_instructions_exist(path: str) -> None:
    text = (DEPLOY / path).read_text().replace("`", "\n")
    # The namespace and the secret have the command's name.
    found = calls(text.replace("-n paceline", "").replace("generic paceline", ""))
    assert found
    for words in found:
        check_call(words)


def test_the_images_have_what_they_copy_and_compile_with_and_end_on_sigterm() -> None:
    text = (DEPLOY / "containers/Dockerfile").read_text()
    first, *later = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert re.fullmatch(r"\S+:\d+\.\d+\.\d+\S*", first)
    assert later == ["base"] * 3, "the wheel, the control plane, every role"
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    assert 'ENTRYPOINT ["tini", "--", "paceline"]' in text
    assert len(re.findall(r"^USER 1000$", text, re.MULTILINE)) == 2
    assert re.search(r"apt-get install .* gcc g\+\+ libc6-dev", text), "Triton and torch.compile"
    assert text.count("chmod -R go-w .") == 2, "modes of a checkout: settings of others are refused"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = settings["tool"]["importlinter"]["root_packages"]
    assert set(packages) <= set(re.findall(r"^COPY (\w+) ", text, re.MULTILINE))


# ---- the manifest that serves an export ------------------------------------------------------

yaml = pytest.importorskip("yaml")
MANIFESTS: dict[str, Any] = {
    one["kind"]: one
    for one in yaml.safe_load_all((DEPLOY / "serving" / "serving.yaml").read_text())
}
POD = MANIFESTS["Deployment"]["spec"]["template"]
(CONTAINER,) = POD["spec"]["containers"]


@pytest.mark.parametrize("kind", MANIFESTS)
def test_kubernetes_accepts_the_manifest_that_serves(kind: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    validator.validate(MANIFESTS[kind], validator.latest_version(), strict=True)


def test_service_policy_and_probes_meet_the_pods_label_and_port() -> None:
    labels, (port,) = POD["metadata"]["labels"], CONTAINER["ports"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    service, policy = MANIFESTS["Service"]["spec"], MANIFESTS["NetworkPolicy"]["spec"]
    assert service["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert [one["targetPort"] for one in service["ports"]] == [port["name"]]
    assert [p["port"] for rule in policy["ingress"] for p in rule["ports"]] == [port["name"]]
    assert f"--port={port['containerPort']}" in CONTAINER["args"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = CONTAINER[probe]["httpGet"]
        assert asked["path"] in OPEN_PATHS and asked["port"] == port["name"], "it needs no key"


def test_the_serving_command_exists_and_its_key_comes_from_the_secret_of_the_instructions() -> None:
    check_call(CONTAINER["args"])
    _, source, *options = CONTAINER["args"]
    given = dict(option.split("=") for option in options)
    assert source.startswith("/runs/")
    (variable,) = CONTAINER["env"]
    assert given["--api-key-env"] == variable["name"]
    secret = variable["valueFrom"]["secretKeyRef"]
    instructions = (DEPLOY / "serving" / "README.md").read_text()
    assert f"secret generic {secret['name']} --from-file=secret\n" in instructions
    assert f"> secret/{secret['key']}\n" in instructions


def test_what_serves_has_no_more_rights_than_a_worker() -> None:
    pod, own = POD["spec"], CONTAINER["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert own == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    mounts = {m["name"]: m for m in CONTAINER["volumeMounts"]}
    assert mounts["runs"]["readOnly"] is True
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert re.fullmatch(r"\S+:\d+\.\d+\.\d+", CONTAINER["image"]), "an image that does not move"
