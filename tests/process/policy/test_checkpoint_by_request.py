"""A checkpoint that is asked for over REST is written by a real trainer and can be restored."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from paceline.observe.checkpoint_links import complete
from policy_worker.checkpoint.checkpoint import read_meta
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.tiny_model import make_tiny_model
from testbed.workers.fake_workers import FakeRollout
from tests.fixtures.rest import bearer, rest_url


async def _train_and_ask(controllers: Controllers) -> dict[str, Any]:
    config, where = config_of(controllers), addresses(controllers)
    worker = FakeRollout(config, where, "rollout-0", tokens=8)
    await worker.start()
    working = asyncio.create_task(worker.work(lambda: False))
    async with httpx.AsyncClient(base_url=rest_url(controllers) + "/api/v1", timeout=60) as client:

        async def get(path: str) -> Any:
            return (await client.get(path)).json()

        async def trains() -> bool:
            return bool((await get("/run"))["step"] >= 2)

        await until(trains, 120)
        assert await get("/checkpoints") == []
        asked = await client.post("/checkpoint", headers=bearer(controllers))
        step = int(asked.json()["message"].split("step ")[1].split()[0])

        async def written() -> bool:
            return bool(await get("/checkpoints"))

        await until(written)

        async def told() -> bool:
            events = (await get("/events?kind=marks"))["events"]
            return any(e["text"].startswith(f"checkpoint of step {found['step']}") for e in events)

        (found,) = await get("/checkpoints")
        await until(told)
        (found,) = await get("/checkpoints")  # its size is in the run files, too
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await worker.stop(goodbye=False)
    assert found["step"] >= step
    return dict(found)


def test_a_checkpoint_by_request_is_on_disk_whole(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    with running_controllers(
        tmp_path,
        1,
        model={"path": str(model), "device": "cpu"},
        train={"checkpoint_every": 100_000, "lr": 1e-6, "steps": 200_000},
    ) as controllers:
        where = ",".join(addresses(controllers))
        with (tmp_path / "policy.log").open("wb") as log:
            trainer = subprocess.Popen(
                [
                    *(sys.executable, "-m", "policy_worker", str(controllers.config)),
                    *("--controllers", where, "--id", "policy-0"),
                    *("--run-dir", str(controllers.run_dir)),
                ],
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        try:
            found = asyncio.run(_train_and_ask(controllers))
        except TimeoutError:
            raise AssertionError((tmp_path / "policy.log").read_text()[-4000:]) from None
        finally:
            trainer.kill()
            trainer.wait()
        (path,) = complete(controllers.run_dir / "checkpoints")
        meta = read_meta(path)
        assert (meta["step"], meta["version"]) == (found["step"], found["version"])
        assert found["path"] == f"checkpoints/{path.resolve().name}" and found["size_bytes"] > 0
