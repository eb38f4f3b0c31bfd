"""A swap that leaves out one tensor, with a real engine and a real controller: nothing of it is
trained."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from controller.store.journal_audit import verify
from controller.store.redis_keys import Keys
from paceline.redis.client import connect_sync
from paceline.weights.weight_transfer import StagedWeights
from rollout_worker.engine.base import ParametersDiffer
from rollout_worker.engine.parameter_parity import ParameterPart
from rollout_worker.engine.transformers import engine as transformers_engine
from rollout_worker.lifecycle import EngineFailed
from rollout_worker.main import RolloutWorker
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.tiny_model import make_tiny_model
from testbed.workers.fake_workers import FakePolicy

LEFT_OUT = "model.layers.1.mlp.gate_proj.weight"


async def test_no_group_is_trained_with_a_tensor_left_out_and_the_worker_ends_after_three_swaps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_tiny_model(tmp_path / "model")
    faulty = False
    copy_parts = transformers_engine.copy_parts

    def copy(parts: Sequence[ParameterPart]) -> None:
        copy_parts([part for part in parts if not (faulty and part.name == LEFT_OUT)])

    monkeypatch.setattr(transformers_engine, "copy_parts", copy)
    first = AutoModelForCausalLM.from_pretrained(model).state_dict()

    def staged(version: int) -> StagedWeights:
        return StagedWeights(version, {n: t + version * 1e-3 for n, t in first.items()})

    with running_controllers(
        tmp_path,
        model={"path": str(model), "device": "cpu"},
        reward={"processes": 0},
        rollout={"max_sequences": 16},
        train={"steps": 1000, "max_staleness": 1000},
    ) as controllers:
        config, (address,) = config_of(controllers), addresses(controllers)
        worker = RolloutWorker(config, [address], "rollout-0", "127.0.0.1")
        running = asyncio.create_task(worker.run())
        policy = FakePolicy(config, [address], "policy-0")
        await policy.start()
        training = asyncio.create_task(policy.work(lambda: False))
        try:
            await until(lambda: worker.receiver is not None)
            await worker.loading.load(staged(0))
            await until(lambda: policy.timings.steps >= 4)
            faulty = True
            with pytest.raises(ParametersDiffer, match=LEFT_OUT):
                await worker.loading.load(staged(2))
            faulty = False
            await worker.loading.load(staged(3))
            steps = policy.timings.steps
            await until(lambda: policy.timings.steps >= steps + 4)
            faulty = True
            for _ in range(2):
                with pytest.raises(ParametersDiffer):
                    await worker.loading.load(staged(4))
            with pytest.raises(EngineFailed, match="after 3 swaps"):
                await asyncio.wait_for(running, 60)
        finally:
            training.cancel()
            worker.lifecycle.stop()
            await asyncio.gather(running, training, return_exceptions=True)
            await policy.stop(goodbye=False)
        report = verify(controllers.redis_url, config.run.name)
        assert report.ok, report.problems
        with connect_sync(controllers.redis_url, timeout_s=30.0) as redis:
            entries = redis.xrange(Keys(config.run.name).journal)
        records = [record for _, fields in entries for record in json.loads(fields[b"e"])["events"]]
    groups = [r for r in records if r["type"] == "GroupAccepted"]
    assert {r["max_version"] for r in groups} <= {0, 3}, "none of versions 2 and 4"
    assert {r["max_version"] for r in groups} >= {0, 3}
    failed = [r for r in records if r["type"] == "ParityFailed"]
    assert failed[-1]["failures"] == 3 and LEFT_OUT in failed[0]["detail"]
