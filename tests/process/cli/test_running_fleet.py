"""The commands against real controllers with a trainer and a generator: what people look at."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.observe.run_watcher import follow_events
from paceline.rpc.auth import TOKEN_FILE
from paceline.rpc.client import ControlPlane
from paceline_launcher.cli import app
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, control_of, running_controllers, status, until
from testbed.fleets.local_run import ROOT
from testbed.patience import Patience
from tests.fixtures.rest import HTML, train

SETTINGS = {"train": {"checkpoint_every": 1000}, "fleet": {"lease_ttl_s": 3600.0}}
STEPS = 4
Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controllers]:
    directory = tmp_path_factory.mktemp("cli")
    with running_controllers(directory, 2, **SETTINGS) as controllers:
        # As `paceline up` leaves it.
        shutil.copy(controllers.config, controllers.run_dir / "config.toml")
        asyncio.run(train(controllers, STEPS))
        asyncio.run(_all_known(controllers))
        yield controllers


async def _all_known(controllers: Controllers) -> None:
    """The leader hears of the others once a second, and the run's files follow the journal."""
    control = control_of(controllers)

    async def known() -> bool:
        states = {c.state for c in (await status(control)).controllers}
        return states == {"leader", "standby"}

    async def written() -> bool:
        path = controllers.run_dir / "metrics.jsonl"
        return path.is_file() and len(path.read_text().splitlines()) >= STEPS

    await until(known)
    await until(written)
    await control.close()


def targets(fleet: Controllers) -> list[list[str]]:
    return [
        ["--run-dir", str(fleet.run_dir)],
        ["--controllers", ",".join(addresses(fleet)), *with_token(fleet)],
    ]


def with_token(fleet: Controllers) -> list[str]:
    return ["--token-file", str(fleet.run_dir / TOKEN_FILE)]


def asked(*arguments: str) -> Any:
    shown = CliRunner().invoke(app, [*arguments, "--json"])
    assert shown.exit_code == 0, shown.exception
    return json.loads(shown.stdout)


def test_samples_are_read_from_the_controllers(paceline: Command, fleet: Controllers) -> None:
    for target in targets(fleet):
        found = asked("samples", "--limit", "3", "--sort", "oldest", *target)
        assert len(found["groups"]) == 3
        assert found["total"] >= STEPS * 4
        first = found["groups"][0]
        assert first["group_id"] == "t0"
        assert HTML in first["prompt"]
        assert [c["reward"] for c in first["completions"]] == [0.0, 1.0, 0.0, 1.0]
    of_step = asked("samples", "--step", "2", "--limit", "50", *targets(fleet)[0])
    assert {group["step"] for group in of_step["groups"]} == {2}
    assert of_step["total"] == 4
    text = paceline("samples", "--limit", "1", *targets(fleet)[0]).stdout
    assert "  > prompt of t" in text
    assert "more groups: --limit N" in text


def test_exit_statuses_tell_what_the_leader_has_accepted(
    paceline: Command, fleet: Controllers
) -> None:
    for command in ("pause", "resume"):
        assert paceline(command, *targets(fleet)[0]).returncode == 0
    refused = paceline("drain", "nobody", *targets(fleet)[0])
    assert refused.returncode == 1
    assert "refused" in refused.stderr


def test_heartbeats_are_told_whoever_is_asked_first(fleet: Controllers) -> None:
    """Only the leader hears them: every second look at a fleet had none."""
    for where in (addresses(fleet), addresses(fleet)[::-1]):
        look = ["status", "--controllers", ",".join(where), *with_token(fleet)]
        patience = Patience(60)
        # On a busy machine the leader may be late or another one, and then nobody has heard for
        # a moment.
        while not (all_heard(look) and all_heard(look)):
            assert patience.left()


def all_heard(look: list[str]) -> bool:
    living = [w for w in asked(*look)["workers"] if w["state"] not in ("dead", "stopped")]
    assert living
    return all(w["heartbeat_age_s"] >= 0 for w in living)


async def test_a_quiet_run_is_followed_over_a_failover_and_to_its_end(tmp_path: Path) -> None:
    with running_controllers(tmp_path, 2, **SETTINGS) as controllers:
        control = control_of(controllers)
        await until(lambda: _leads(control, "controller-0"))
        where = ["--controllers", ",".join(addresses(controllers)), *with_token(controllers)]
        terms: list[str] = []

        async def follow() -> None:
            # Shorter than the quiet time before the kill: quiet is no reason to give up.
            async for event in follow_events(control, gone_s=5.0):
                if event["type"] == "TermBegun":
                    terms.append(event["controller_id"])

        follower = asyncio.create_task(follow())
        top = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline_launcher", "top", "--every", "0.1"),
            *where,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert top.stdout is not None
        try:
            assert await top.stdout.readline(), "it tells of the run so far"
            await until(lambda: terms == ["controller-0"])
            done, _ = await asyncio.wait([follower], timeout=5.2)
            assert not done, "it gave up in the quiet time"
            controllers.started[0].kill()
            while b"controller-1 leads" not in (line := await top.stdout.readline()):
                assert line
            await until(lambda: terms == ["controller-0", "controller-1"])
            await asyncio.to_thread(CliRunner().invoke, app, ["stop", *where])
            assert await top.wait() == 0
        finally:
            follower.cancel()
            if top.returncode is None:
                top.kill()
                await top.wait()
        await control.close()


async def _leads(control: ControlPlane, controller_id: str) -> bool:
    return (await status(control)).leader == controller_id
