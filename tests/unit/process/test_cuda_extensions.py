"""Builds of torchvision for CUDA beside a torch without it: language models are imported all the
same."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not metadata.version("torch").endswith("+cpu"), reason="this torch has CUDA"
)


def install(site: Path, version: str) -> None:
    """A torchvision that fails as the one of the package index does beside a torch without CUDA."""
    package, info = site / "torchvision", site / f"torchvision-{version}.dist-info"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist")\n'
    )
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torchvision\nVersion: {version}\n"
    )


def python(code: str, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(site)},
    )


def test_only_builds_for_cuda_are_hidden(tmp_path: Path) -> None:
    install(tmp_path / "cuda", "0.28.0")
    install(tmp_path / "cpu", "0.28.0+cpu")
    look = "import paceline, importlib.util as u; print(u.find_spec('torchvision') is not None)"
    assert python(look, tmp_path / "cuda").stdout.strip() == "False"
    assert python(look, tmp_path / "cpu").stdout.strip() == "True"


def test_a_process_that_a_library_spawns_does_not_find_it_either(tmp_path: Path) -> None:
    install(tmp_path, "0.28.0")
    (tmp_path / "library.py").write_text(
        # Imported in the child to find its function, before any module of ours, as vLLM is.
        "import importlib.util as u\nfound = u.find_spec('torchvision') is not None\n"
        "def say(): print(found, flush=True)\n"
    )
    code = (
        "import contextlib, multiprocessing, paceline, library\n"
        "from paceline.cuda_extensions import hidden_in_children\n"
        "for around in (contextlib.nullcontext, hidden_in_children):\n"
        "    with around():\n"
        "        child = multiprocessing.get_context('spawn').Process(target=library.say)\n"
        "        child.start()\n"
        "    child.join()\n"
    )
    done = python(code, tmp_path)
    assert done.stdout.split() == ["True", "False"], done.stderr
