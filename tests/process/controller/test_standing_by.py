"""Spare rollout workers over the wire: they wait with a reason, and begin the moment they are
needed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from controller.store.journal_audit import verify
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2, rollout_pb2
from testbed.fleets.controllers import (
    addresses,
    config_of,
    running_controllers,
    status,
    until,
    working_fleet,
)
from testbed.workers.fake_workers import FakeRollout


async def test_a_waiting_spare_is_leased_a_dead_workers_tasks_across_a_failover(
    tmp_path: Path,
) -> None:
    with running_controllers(
        tmp_path, 2, train={"max_staleness": 8}, fleet={"rollout": 1, "rollout_spares": 1}
    ) as controllers:
        async with working_fleet(controllers, rollouts=0):
            config, targets = config_of(controllers), addresses(controllers)
            working = FakeRollout(config, targets, "rollout-0")
            spare = FakeRollout(config, targets, "rollout-1")
            for worker in (working, spare):
                await worker.start()
                await until(lambda worker=worker: worker.version >= 0)
            held = {lease.task.task_id for lease in (await working.lease()).leases}
            idle = await spare.lease(wait_s=0.0)
            assert idle.empty_reason == rollout_pb2.EMPTY_REASON_SPARE
            control = ControlPlane.from_config(config, targets)
            seen = await status(control)
            assert {w.worker_id: w.state for w in seen.workers if w.role == spare.role} == {
                "rollout-0": "running",
                "rollout-1": "spare",
            }
            assert dict(seen.spares) == {"rollout": 1} and seen.desired["rollout"] == 1

            controllers.started[0].kill()
            spare.lease_seq -= 1  # an answer without tasks uses up no number
            asking = asyncio.create_task(spare.lease(wait_s=20.0))
            exit_of = admin_pb2.ExitReport(
                worker_id="rollout-0", incarnation=working.session.caller.incarnation
            )
            await working.stop(goodbye=False)
            await control.call("AdminService.ReportExit", exit_of, 20.0)
            again = {lease.task.task_id for lease in (await asking).leases}
            assert again == held
            seen = await status(control)
            states = {w.worker_id: w.state for w in seen.workers if w.role == spare.role}
            assert states["rollout-1"] == "running"
            await spare.stop(goodbye=False)
            await control.close()
        report = verify(controllers.redis_url, "load")
        assert report.ok, report.problems
