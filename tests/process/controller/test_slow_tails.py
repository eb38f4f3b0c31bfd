"""A slow worker at the tail of a step, over the wire: the task is tried again, and counted once."""

from __future__ import annotations

from pathlib import Path

from controller.store.journal_audit import verify
from paceline.v1 import rollout_pb2
from testbed.controllers import addresses, config_of, running_controllers, until, working_fleet
from testbed.fake_workers import FakeRollout
from tests.fixtures.partial_work import partial, report


async def test_an_idle_worker_overtakes_a_slow_one_and_the_slow_one_is_told(tmp_path: Path) -> None:
    with running_controllers(
        tmp_path, train={"max_staleness": 0, "groups_per_step": 4}, rollout={"speculative": True}
    ) as controllers:
        async with working_fleet(controllers, rollouts=0) as ((policy,), _):
            config, targets = config_of(controllers), addresses(controllers)
            slow, idle = (FakeRollout(config, targets, f"rollout-{i}") for i in (8, 9))
            for worker in (slow, idle):
                await worker.start()
                await until(lambda worker=worker: worker.version >= 0)
            *quick, last = (await slow.lease()).leases
            for lease in quick:
                group = slow.group_for(lease)
                group.generate_s = 0.2
                assert (await slow.submit(group)).verdict == rollout_pb2.VERDICT_ACCEPTED
            await report(slow, partial(last.task.task_id, 1, 9))
            # Asked at once, answered when the task has become slow: no event says so.
            (again,) = (await idle.lease(wait_s=20.0)).leases
            assert (again.task.task_id, again.task.attempt) == (last.task.task_id, 2)
            assert again.seed == last.seed
            assert len(again.partial.completions[0].tokens) == 9 * 4

            accepted = await idle.submit(idle.group_for(again))
            assert accepted.verdict == rollout_pb2.VERDICT_ACCEPTED
            await until(lambda: last.task in slow.session.directive.cancelled)
            late = await slow.submit(slow.group_for(last))
            assert late.verdict == rollout_pb2.VERDICT_SUPERSEDED
            await until(lambda: policy.timings.steps >= 1)
            for worker in (slow, idle):
                await worker.stop(goodbye=False)
        checked = verify(controllers.redis_url, "load")
        assert checked.ok, checked.problems
        assert checked.counts["dispatched"] == checked.counts["trained"] == 4
        assert checked.counts["duplicates"] == checked.counts["lost"] == 0
