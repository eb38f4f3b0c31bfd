"""Weights that a real rollout worker gets over a real link, and has no memory for."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.store.redis_keys import Keys
from paceline.redis.client import connect_sync
from paceline.v1 import admin_pb2, worker_pb2
from policy_worker.publisher import WeightPublisher
from rollout_worker import weight_receiver
from rollout_worker.lifecycle import EngineFailed
from rollout_worker.main import RolloutWorker
from rollout_worker.weight_loading import LOAD_TRIES
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.tiny_model import make_tiny_model
from testbed.workers.fake_workers import FakePolicy

LACK = "CUDA out of memory. Tried to allocate 2.00 GiB"
ERROR = f"OutOfMemoryError: {LACK}"


class Publishing(FakePolicy):
    """A replica that sends the weights of a model as every version, to the receivers that its
    directive names."""

    def publishes(self, url: str, weights: dict[str, torch.Tensor]) -> None:
        self.publisher = WeightPublisher(
            url=url,
            run_id=self.config.run.name,
            device=torch.device("cpu"),
            on_link_error=lambda epoch, detail: None,
            host="127.0.0.1",
        )
        self.publisher.publish(0, weights.items())
        self.session.on_directive(self.follow)

    def follow(self, directive: worker_pb2.Directive) -> None:
        own = self.session.caller.incarnation
        self.publisher.set_links([k for k in directive.links if k.publisher.incarnation == own])


class Scene:
    def __init__(self, worker: RolloutWorker, redis_url: str, policy: FakePolicy) -> None:
        self.worker = worker
        self.ended = asyncio.create_task(worker.run())
        self._redis_url = redis_url
        self._policy = policy

    async def why(self) -> admin_pb2.WhyReply:
        return await self._policy.control.call("AdminService.Why", admin_pb2.WhyRequest(), 20.0)

    def failures(self) -> list[dict[str, Any]]:
        """As the journal has them."""
        with connect_sync(self._redis_url, timeout_s=30.0) as redis:
            entries = redis.xrange(Keys(self._policy.config.run.name).journal)
        events = [e for _, fields in entries for e in json.loads(fields[b"e"])["events"]]
        return [e for e in events if e["type"] == "WeightsNotLoaded"]


Play = Callable[[int], Any]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    @asynccontextmanager
    async def play(lacking: int) -> AsyncIterator[Scene]:
        """The first ``lacking`` versions that come find no memory."""
        left, whole = lacking, weight_receiver.receive_snapshot

        def receive(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            staged = whole(*arguments, **named)
            left -= 1
            if left >= 0:
                raise torch.OutOfMemoryError(LACK)
            return staged

        monkeypatch.setattr(weight_receiver, "receive_snapshot", receive)
        model = make_tiny_model(tmp_path / "model")
        with running_controllers(
            tmp_path,
            model={"path": str(model), "device": "cpu"},
            reward={"processes": 0},
            rollout={"max_sequences": 16},
        ) as controllers:
            config, (address,) = config_of(controllers), addresses(controllers)
            policy = Publishing(config, [address], "policy-0")
            policy.publishes(
                controllers.redis_url, AutoModelForCausalLM.from_pretrained(model).state_dict()
            )
            await policy.start()
            training = asyncio.create_task(policy.work(lambda: False))
            worker = RolloutWorker(config, [address], "rollout-0", "127.0.0.1")
            scene = Scene(worker, controllers.redis_url, policy)
            try:
                yield scene
            finally:
                training.cancel()
                worker.lifecycle.stop()
                await asyncio.gather(scene.ended, training, return_exceptions=True)
                await policy.stop(goodbye=False)
                policy.publisher.close()

    return play


async def test_a_lack_of_memory_is_named_until_the_weights_are_loaded(play: Play) -> None:
    async with play(LOAD_TRIES - 1) as scene:
        await until(lambda: scene.worker.admitted and scene.worker.engine.version == 0)
        await until(lambda: [e["failures"] for e in scene.failures()][-1:] == [LOAD_TRIES - 1])
        assert {e["detail"] for e in scene.failures()} == {f"weights not staged: {ERROR}"}

        async def settled() -> bool:
            return "failed" not in (await scene.why()).sentence

        await until(settled)
        assert not scene.ended.done()


async def test_a_worker_without_memory_for_the_weights_ends_and_is_named(play: Play) -> None:
    async with play(1000) as scene:

        async def named() -> bool:
            found = await scene.why()
            told = found.culprit.name == "rollout-0" and ERROR in found.sentence
            return told and "more memory" in found.remedy

        await until(named)
        with pytest.raises(EngineFailed, match=f"failed to load {LOAD_TRIES} times: {ERROR}"):
            await asyncio.wait_for(asyncio.shield(scene.ended), 60)
        await until(lambda: [e["failures"] for e in scene.failures()][-1:] == [LOAD_TRIES])
