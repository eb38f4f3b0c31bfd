"""Fleet loops of the leader: calls of the provider and of the autoscaler.

    desired counts ──► provisioning ──► provider ──► processes         (not with the local provider)
    committed steps ─► autoscaling ──► proposal ──► Scale, if fleet.autoscale

Both run as asyncio tasks for the term of a leader. The next leader can recompute their state. A
failure of either is logged and retried; it never ends the term.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from controller.leader import Leader
from controller.ledger.commands import CommandRefused, Drain
from controller.replicated_controller import Controller
from controller.runtime import NotLeading
from controller.scaling.autoscaler import Autoscaling
from controller.status import status_of
from controller.store.journal import Deposed
from paceline.process.structured_log import event
from paceline.providers import Provider, Trouble, leader_provider
from paceline.v1 import admin_pb2

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Interval at which desired and living workers are compared with those of the last call."""
TROUBLED_S = 3.0
TURN_LIMIT_S = 120.0


def keep_fleet(controller: Controller, leader: Leader) -> list[asyncio.Task[None]]:
    """Starts the tasks. The caller cancels them at the end of the term."""
    tasks = [_kept("autoscaling", Autoscaling(leader).run)]

    async def drain(worker: admin_pb2.WorkerStatus) -> None:
        # One request id per process: every call and every leader may repeat it.
        request = f"surplus-{worker.worker_id}-{worker.incarnation}"
        await leader.execute(Drain(request, worker.worker_id, replace=True))

    provider = leader_provider(controller.config, str(controller.run_dir.resolve()), drain)
    if provider is not None:
        provisioning = Provisioning(controller, leader, provider)
        tasks.append(_kept("provisioning", provisioning.run))
    return tasks


def _kept(name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
    async def keep() -> None:
        while True:
            try:
                await run()
            except Exception:
                log.exception("%s failed, retrying", name)
            await asyncio.sleep(TROUBLED_S)

    return asyncio.create_task(keep(), name=name)


@dataclass(slots=True)
class Provisioning:
    """Calls the provider repeatedly, each time with a new status."""

    controller: Controller
    leader: Leader
    provider: Provider

    async def run(self) -> None:
        try:
            while True:
                seen = self._signature()
                await self._turn()
                await self._until_due(seen)
        finally:
            await self.provider.close()

    async def _turn(self) -> None:
        if not self.leader.active:
            return
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                trouble = await self.provider.converge(status_of(self.controller))
        except (NotLeading, Deposed):
            return
        except Trouble as why:
            trouble = str(why)
        except CommandRefused as refusal:
            trouble = f"a worker could not be drained: {refusal}"
        except TimeoutError:
            trouble = f"the provider did not answer for {TURN_LIMIT_S:g} s"
        if trouble != self.leader.provider_trouble:
            self.leader.provider_trouble = trouble
            event(log, "provider", name=self.provider.name, status=trouble or "complete")

    async def _until_due(self, seen: object) -> None:
        """Waits until the provider's input has changed or its next call is due."""
        loop = asyncio.get_running_loop()
        quiet_s = TROUBLED_S if self.leader.provider_trouble else self.provider.quiet_s
        due = loop.time() + quiet_s
        while loop.time() < due:
            await asyncio.sleep(POLL_S)
            if self._signature() != seen:
                return

    def _signature(self) -> object:
        status = status_of(self.controller)
        workers = sorted((w.worker_id, w.incarnation, w.state) for w in status.workers)
        return status.phase, dict(status.desired), workers
