"""Commands of single roles: the process that they become."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline_launcher.cli import app
from testbed.patience import patient

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


LEAVING = """
import asyncio, signal
from paceline.process.lifetime import leave_on_signal
async def role():
    loop = asyncio.get_running_loop() if {in_loop} else None
    leave_on_signal(lambda: print("leaving", flush=True), {grace_s}, loop)
    print("up", flush=True)
    await asyncio.Event().wait() if {in_loop} else [signal.pause() for _ in range(9)]
asyncio.run(role())
"""


@pytest.mark.parametrize("in_loop", [True, False])
@pytest.mark.parametrize("grace_s", [0.01, 600.0])
def test_who_takes_too_long_to_leave_or_is_told_twice_ends_at_once(
    grace_s: float, in_loop: bool
) -> None:
    code = LEAVING.format(grace_s=grace_s, in_loop=in_loop)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as role:
        assert role.stdout is not None and role.stdout.readline() == "up\n"
        role.send_signal(signal.SIGTERM)
        assert role.stdout.readline() == "leaving\n"
        if grace_s > 1.0:
            role.send_signal(signal.SIGTERM)
        assert role.wait(patient(60)) == -signal.SIGTERM
