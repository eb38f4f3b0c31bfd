"""Commands of single roles: the process that they become."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_launcher.cli import app

CONFIG = """
[run]
name = "r"
[model]
path = "m"
[data]
path = "d"
[scorers.judge]
kind = "reward_model"
path = "s"
"""


@pytest.mark.parametrize("role", ["policy", "rollout", "scorer"])
@pytest.mark.parametrize("given", [(), ("--tensor-host", "10.1.0.7")])
def test_the_address_for_other_workers_reaches_the_role(
    role: str, given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: became.append(argv))
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    where = ("--controllers", "a:7000", "--id", "one", "--run-dir", str(tmp_path / "run"))
    done = CliRunner().invoke(app, [role, str(config), *where, *given])
    assert done.exit_code == 0, done.output
    (argv,) = became
    assert f"{role}_worker" in argv
    at = argv.index("--tensor-host") if given else len(argv)
    assert tuple(argv[at : at + 2]) == given and "--tensor-host" not in argv[:at]
