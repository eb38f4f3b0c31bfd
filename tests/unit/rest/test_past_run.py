"""A run that is over, read again: its page has what its files have."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from controller.rest.app import Rest
from controller.rest.past_run import bind_loopback, past_controller, serve_past_run
from paceline.observe.run_files import RunFileWriter
from paceline_launcher.cli import app
from tests.unit.rest.test_recorded_journals import entries_of

CONFIG = """
[run]
name = "sim"
[model]
path = "/m"
[data]
path = "rows"
[redis]
url = "redis://recorded"
[train]
steps = 7
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The files of a recorded run."""
    writer = RunFileWriter(tmp_path)
    entries = entries_of("34")
    for entry in entries:
        for record in entry.records:
            writer.record(entry.at.entry, entry.t, record)
    writer.close()
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


async def test_the_page_of_a_run_that_is_over_has_its_curves_and_its_end(run_dir: Path) -> None:
    before = contents(run_dir)
    rest = Rest(past_controller(run_dir), token="secret", loopback=True)
    transport = httpx.ASGITransport(app=rest.asgi)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def get(path: str) -> Any:
            answer = await client.get(f"/api/v1/{path}")
            assert answer.status_code == 200, f"{path}: {answer.text}"
            return answer.json()

        run = await get("run")
        assert (run["phase"], run["step"], run["run_name"]) == ("finished", 7, "sim")
        assert run["metrics"]["reward_mean"] > 0 and run["samples_trained"] > 12
        assert "has finished after step 7" in run["bottleneck"]
        why = await get("why")
        assert why["severity"] == "ok" and "has finished after step 7" in why["sentence"]
        assert (await get("metrics?names=reward_mean"))["x"] == [*range(1, 8)]
        events = (await get("events?limit=50"))["events"]
        assert "RunFinished" in [event["type"] for event in events]
        for path in ("steps", "workers", "flow", "checkpoints", "groups", "config"):
            await get(path)
        assert (await get("faults"))["faults"] > 3
        assert (await client.get("/api/v1/groups/t1")).status_code == 404
        assert (await client.get("/")).status_code == 200
        write = await client.post("/api/v1/pause", headers={"Authorization": "Bearer secret"})
        assert write.status_code == 503
    assert before == contents(run_dir)


async def test_the_page_is_served_until_it_is_ended(run_dir: Path) -> None:
    door, url = bind_loopback(0)
    serving = asyncio.create_task(serve_past_run(run_dir, door, token="secret"))
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/api/v1/run")).json()["phase"] == "finished"
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["open", str(tmp_path)])
    assert told.exit_code != 0 and "no run directory" in str(told.exception)
