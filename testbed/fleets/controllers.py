"""Small fleets of real controllers and protocol-only workers, and how to await their state."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from controller.store.journal_audit import verify
from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.rpc.auth import TOKEN_FILE
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from testbed.fleets.controller_processes import Controllers, write_config
from testbed.patience import Patience, patient
from testbed.workers.fake_workers import FakePolicy, FakeRollout, FakeWorker

SMALL = {"group_size": 4, "max_tokens": 16}


@contextmanager
def running_controllers(directory: Path, number: int = 1, **sections: Any) -> Iterator[Controllers]:
    """``number`` started controllers of a small run; ``sections`` go into its config."""
    sections.setdefault("rollout", {})
    sections["rollout"] = {**SMALL, **sections["rollout"]}
    sections["train"] = {"groups_per_step": 4, "steps": 1000, **sections.get("train", {})}
    with Controllers(directory, write_config(directory, **sections)) as controllers:
        for index in range(number):
            controllers.start(f"controller-{index}")
        yield controllers


def addresses(controllers: Controllers) -> list[str]:
    return [c.address for c in controllers.started if c.process.poll() is None]


def config_of(controllers: Controllers) -> Config:
    """The run's config, with the token that its controllers ask for."""
    config = load_config(controllers.config, [])
    if config.auth.token_file is not None:
        return config
    own = {"token_file": str(controllers.run_dir / TOKEN_FILE)}
    return config.model_copy(update={"auth": config.auth.model_copy(update=own)})


def control_of(controllers: Controllers, where: list[str] | None = None) -> ControlPlane:
    """A client of the controllers at ``where`` (default: all that live) with the run's token."""
    return ControlPlane.from_config(config_of(controllers), where or addresses(controllers))


def assert_sound(redis_url: str) -> dict[str, Any]:
    """Replays the run's journal: nothing lost, nothing trained twice. Its counts."""
    report = verify(redis_url, "load")
    assert report.ok, report.problems
    assert report.counts["lost"] == report.counts["duplicates"] == 0
    return report.counts


async def status(control: ControlPlane) -> admin_pb2.StatusReply:
    request = admin_pb2.StatusRequest()
    reply: admin_pb2.StatusReply = await control.call("AdminService.GetStatus", request, 20.0)
    return reply


async def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Returns once ``condition`` (maybe async) holds; TimeoutError otherwise."""
    patience = Patience(timeout_s)
    while patience.left():
        # A condition that hangs ends too.
        async with asyncio.timeout(patient(timeout_s)):
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
        if found:
            return
        await asyncio.sleep(0.02)
    raise TimeoutError


@asynccontextmanager
async def working_fleet(
    controllers: Controllers,
    policies: int = 1,
    rollouts: int = 2,
    *,
    where: list[str] | None = None,
) -> AsyncIterator[tuple[list[FakePolicy], list[FakeRollout]]]:
    """Workers that train and generate until the block ends."""
    config, targets = config_of(controllers), where or addresses(controllers)
    trainers = [FakePolicy(config, targets, f"policy-{i}") for i in range(policies)]
    generators = [
        FakeRollout(config, targets, f"rollout-{i}", tasks_a_lease=2) for i in range(rollouts)
    ]
    workers: list[FakeWorker] = [*trainers, *generators]
    await asyncio.gather(*(worker.start() for worker in workers))
    loops = [asyncio.create_task(w.work(lambda: False)) for w in [*trainers, *generators]]
    try:
        yield trainers, generators
        for loop in loops:
            if loop.done():
                loop.result()
    finally:
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await asyncio.gather(*(worker.stop(goodbye=False) for worker in workers))
