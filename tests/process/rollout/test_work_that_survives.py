"""What a worker has generated of a task goes on elsewhere when the worker dies or leaves."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.store.journal_audit import verify
from paceline.config.schema import Config
from paceline.dataset.data_order import task_seed
from paceline.payloads.redis_payloads import RedisPayloads
from paceline.payloads.store import partial_ref
from paceline.rpc.auth import TOKEN_VARIABLE, own_token
from paceline.v1 import rollout_pb2, worker_pb2
from paceline.weights.weight_transfer import StagedWeights
from rollout_worker.engine.base import Completion, Finish, Request, SamplingParams
from rollout_worker.engine.choice import make_engine
from rollout_worker.main import RolloutWorker
from rollout_worker.tasks.partial_rollouts import GROWTH, prefixes_of
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.patience import patient
from testbed.tiny_model import make_endless_model
from testbed.workers.fake_workers import FakePolicy
from tests.fakes.rollout_controller import RolloutController
from tests.fixtures.engines import Reference, needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_endless_model(tmp_path_factory.mktemp("model"))


async def loaded(worker: RolloutWorker, model: Path, version: int = 0) -> None:
    """Returns once the worker runs and serves the model's weights as ``version``."""
    await until(lambda: worker.lifecycle.state == worker_pb2.LIFECYCLE_RUNNING, 120.0)
    weights = AutoModelForCausalLM.from_pretrained(model)
    await worker.loading.load(StagedWeights(version, dict(weights.named_parameters())))


@pytest.mark.parametrize(
    "engine",
    ["transformers", pytest.param("vllm", marks=[needs_vllm, pytest.mark.long])],
)
@pytest.mark.timeout(600)
async def test_a_worker_killed_late_in_a_sample_costs_little_of_it(
    engine: str, model: Path, tmp_path: Path
) -> None:
    """Killed at token 210 of 256, with a write every 32 or 64 tokens: the next owner generates the
    rest, and the sample is the one that would have been made undisturbed. No process of the killed
    worker's engine is left."""
    killed_at, length = 210, 256
    # vLLM's running sequences are looked at every few tokens.
    every, ranks = (64, 2) if engine == "vllm" else (32, 1)
    if engine == "vllm":
        model = make_endless_model(tmp_path / "model", hidden=128)
    with running_controllers(
        tmp_path,
        model={"path": str(model), "device": "cpu"},
        data={"answer_field": "answer"},
        reward={"processes": 0},
        rollout={
            "engine": engine,
            "tensor_parallel": ranks,
            "group_size": 2,
            "max_tokens": length,
            "max_sequences": 8,
            "partial_every_tokens": every,
        },
        train={"groups_per_step": 1, "max_staleness": 0},
        fleet={"lease_ttl_s": 1.0, "heartbeat_s": 0.2},
    ) as controllers:
        config, (address,) = config_of(controllers), addresses(controllers)
        payloads = RedisPayloads([controllers.redis_url], config.run.name)
        policy = FakePolicy(config, [address], "policy-0")
        await policy.start()
        training = asyncio.create_task(policy.work(lambda: False))
        halting = (str(controllers.config), address, str(killed_at))
        victim = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.fakes.failpoint_rollout", *halting),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, TOKEN_VARIABLE: own_token(controllers.run_dir)},
        )
        survivor = RolloutWorker(config, [address], "rollout-1", "127.0.0.1")
        if engine == "vllm":
            # One rank goes on with what two began, and is started in half the time.
            one = config.rollout.model_copy(update={"tensor_parallel": 1})
            survivor.engine = make_engine(
                config.model_copy(update={"rollout": one}), survivor.tokenizer
            )
        # Two engines start in the time of one; without weights this one is given nothing.
        running = asyncio.create_task(survivor.run())
        try:
            assert victim.stdout is not None
            async with asyncio.timeout(patient(300)):  # the start of two engines
                # vLLM prints lines of its own.
                while not (said := await victim.stdout.readline()).startswith(b'{"tokens"'):
                    assert said, "it ended before it stood still"
            generated = json.loads(said)["tokens"]
            assert killed_at <= generated < length

            async def stored() -> int:
                (blob,) = await payloads.get([partial_ref("t0")])
                partial = rollout_pb2.PartialGroup.FromString(blob or b"")
                return min((len(c.tokens) // 4 for c in partial.completions), default=0)

            lost = generated - int(generated / GROWTH) + every
            await until(lambda: _exceeds(stored(), generated - lost))
            of_victim = psutil.Process(victim.pid).children(recursive=True)
            if engine == "vllm":
                # The engine's process, which stands still, its ranks, perhaps a resource tracker.
                assert len(of_victim) >= 1 + ranks
            victim.kill()
            _, left = await asyncio.to_thread(psutil.wait_procs, of_victim, timeout=patient(60))
            for process in left:
                process.kill()
            assert not left
            await victim.wait()
            await loaded(survivor, model)
            await until(lambda: policy.timings.steps >= 1, 60.0)
            (payload,) = await payloads.get([("t0", 2)])
            assert payload is not None
            group = rollout_pb2.Group.FromString(payload)
            twice = generated - survivor.tasks.partials.continued_tokens // 2
            assert 0 <= twice < lost
            prompt = np.frombuffer(group.prompt_tokens, "<i4")
            params = SamplingParams(length, seed=task_seed(config.run.seed, "t0"))
            undisturbed = await survivor.engine.generate(Request("whole", prompt, params, 2))
            reference = Reference(model)
            for completion, whole in zip(group.completions, undisturbed, strict=True):
                sample = sample_of(completion)
                assert len(sample.tokens) == length and sample.versions == ((0, length),)
                expected = reference.logprobs(prompt.tolist(), sample)
                np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3)
                if survivor.engine.exact_continuation:
                    assert sample.tokens.tolist() == whole.tokens.tolist()
            await until(lambda: _is(payloads.get([partial_ref("t0")]), [None]))
        finally:
            if victim.returncode is None:
                victim.kill()
                await victim.wait()
            training.cancel()
            survivor.lifecycle.stop()
            await asyncio.gather(training, running, return_exceptions=True)
            await policy.stop(goodbye=False)
            await payloads.close()
        report = verify(controllers.redis_url, config.run.name)
        assert report.ok, report.problems
        assert report.counts["duplicates"] == 0 and report.counts["lost"] == 0


async def _exceeds(found: Awaitable[int], bound: int) -> bool:
    return await found > bound


async def _is(found: object, wanted: int) -> bool:
    return bool(await found == wanted)  # type: ignore[misc]


def sample_of(completion: rollout_pb2.Completion) -> Completion:
    return Completion(
        np.frombuffer(completion.tokens, "<i4"),
        np.frombuffer(completion.logprobs, "<f4"),
        tuple((span.version, span.length) for span in completion.versions),
        Finish.LENGTH,
    )


async def test_a_worker_that_leaves_hands_back_the_newest_of_its_work(model: Path) -> None:
    controller = RolloutController()
    address = await controller.start()
    config = Config.model_validate(
        {
            "model": {"path": str(model), "device": "cpu"},
            "data": {"path": "unused", "max_prompt_tokens": 64},
            "reward": {"processes": 0},
            "rollout": {"group_size": 2, "max_tokens": 400},
        }
    )
    worker = RolloutWorker(config, [address], "rollout-0", "127.0.0.1")
    ended = asyncio.create_task(worker.run())
    try:
        await loaded(worker, model, 3)
        task = controller.lease("t0")
        await until(lambda: worker.engine.stats().tokens > 32)
        worker.lifecycle.stop()
        await asyncio.wait_for(ended, 60)
        left = await controller.partial("t0")
    finally:
        worker.lifecycle.stop()
        await asyncio.wait([ended], timeout=patient(60))
        await controller.close()
    assert controller.returns[task].kind == rollout_pb2.RETURN_KIND_HAND_BACK
    made = worker.engine.stats().tokens
    assert sum(len(c.tokens) // 4 for c in left.completions) == made, "to the last token"
    prompt = np.frombuffer(left.prompt_tokens, "<i4")
    lease = rollout_pb2.Lease(group_size=2)
    for sample in prefixes_of(left, lease, prompt, max_tokens=400, version=3):
        assert sample is not None
        expected = Reference(model).logprobs(prompt.tolist(), sample)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-3)
