"""Gradients that are never finite end a run with the reason, by default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from controller.store.journal_audit import verify
from paceline.v1 import common_pb2, policy_pb2
from testbed.fleets.controllers import running_controllers, status, until, working_fleet
from testbed.workers.fake_workers import FakePolicy

DEFAULT = 10
"""Of train.max_nonfinite_steps."""


async def test_so_many_steps_in_a_row_as_the_default_says_fail_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step that changes weights is among them: the count begins again behind it."""
    finite = FakePolicy.stats

    def stats(self: FakePolicy, plan: policy_pb2.StepPlan) -> dict[str, common_pb2.Stat]:
        skipped = float(plan.step != 3)
        measured = common_pb2.Stat(sum=skipped, weight=1.0, max=skipped)
        return {**finite(self, plan), "update_skipped": measured}

    monkeypatch.setattr(FakePolicy, "stats", stats)
    with running_controllers(tmp_path, 1, train={"steps": 40}) as controllers:
        async with working_fleet(controllers) as (policies, _):

            async def failed() -> bool:
                return (await status(policies[0].control)).phase == "failed"

            await until(failed)
            state = await status(policies[0].control)
            assert state.step == 3 + DEFAULT
        report = verify(controllers.redis_url, "load")
        assert report.ok, report.problems

        def reasons() -> list[str]:
            lines = (controllers.run_dir / "events.jsonl").read_text().splitlines()
            return [e["reason"] for e in map(json.loads, lines) if e["type"] == "RunFailed"]

        await until(lambda: bool(reasons()))
        (reason,) = reasons()
        assert (
            f"the gradients of {DEFAULT} steps in a row were not finite, from step 4 on" in reason
        )
        assert "lower train.optimizer.lr" in reason and "train.max_nonfinite_steps" in reason
