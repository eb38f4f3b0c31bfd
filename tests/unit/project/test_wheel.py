"""The wheel: which packages and data files pip installs."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from paceline_launcher.cli.demo import CARRIED, FILES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel that is built from the files that git knows."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(ROOT / name)
    build = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
    words = [sys.executable, "-c", build, str(out)]
    done = subprocess.run(words, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_a_wheel_has_the_packages_of_the_layers_and_no_other(files: set[str]) -> None:
    """No test bench, benchmark or example, and no name that another project could have."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(settings["tool"]["importlinter"]["root_packages"])
    tops = {name.partition("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    tools = ("testbed", "tests", "benchmarks", "simulator", "planner")
    assert not [name for name in files if set(name.split("/")) & set(tools)]


def test_a_wheel_has_every_file_that_its_packages_read(files: set[str]) -> None:
    """Templates, the page of the dashboard, settings and types: all that git knows beside
    modules."""
    packages = sorted({name.partition("/")[0] for name in files if ".dist-info" not in name})
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *packages]
    known = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    missing = {name for name in known.splitlines() if (ROOT / name).is_file()} - files
    assert not missing
    assert "paceline_launcher/render/templates/slurm/nodes.sh" in files
    assert "controller/rest/static/index.html" in files and "paceline/py.typed" in files


def test_a_wheel_has_what_the_demo_copies_and_no_tool_that_made_it(files: set[str]) -> None:
    carried = {path for pattern in FILES for path in CARRIED.glob(pattern)}
    assert len(carried) == 11
    in_wheel = {name for name in files if name.startswith("paceline_launcher/digit_sort/")}
    assert in_wheel == {path.relative_to(ROOT).as_posix() for path in carried}
