"""Environments in real runs: what rollout workers hand in is what trainers train on."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from controller.store.journal_audit import verify
from paceline.v1 import rollout_pb2, worker_pb2
from paceline.weights.weight_transfer import StagedWeights
from policy_worker.objectives.batch import StepTotals, decode
from policy_worker.trainer import EpochMesh, Trainer
from rollout_worker.engine.base import Completion as EngineSample
from rollout_worker.engine.base import Finish
from rollout_worker.environments.base import EnvironmentTask, Sample
from rollout_worker.main import RolloutWorker
from testbed.fleets.controllers import addresses, config_of, running_controllers, until
from testbed.groups_in_hand import add as add_groups
from testbed.workers.fake_workers import FakePolicy
from tests.fixtures.chat_model import make_chat_model
from tests.fixtures.engines import Reference, each_engine, make_test_engine
from tests.fixtures.environment_fixture import (
    logprobs_of,
    mask_of,
    spans_of,
    stage_config,
    stage_of,
    tokens_of,
)


@pytest.mark.parametrize("kind", each_engine(pytest.mark.long))
async def test_log_probs_of_every_turn_are_those_behind_the_whole_transcript(
    tmp_path: Path, kind: str
) -> None:
    """On every engine, at temperatures and filters that shape the distribution."""
    torch.set_num_threads(1)
    model = make_chat_model(tmp_path, hidden=128)
    reference = Reference(model)

    async def three_turns(task: EnvironmentTask, sample: Sample) -> float:
        turn = await sample(task.prompt)
        for said in ("And then?", "And now?"):
            assert turn.room > 0
            turn = await sample([{"role": "user", "content": said}])
        return float(task.index)

    filters = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    config = stage_config(
        model,
        data={"chat": True},
        max_tokens=12,
        max_context=256,
        max_sequences=8,
        engine="vllm" if kind == "vllm" else "transformers",
        **filters,
    )
    engine = make_test_engine(kind, config)
    await engine.start()
    try:
        await engine.load_weights(3, dict(reference.model.named_parameters()))
        async with stage_of(config, three_turns, engine) as stage:
            group = await stage.group()
    finally:
        await engine.close()
    prompt = np.frombuffer(group.prompt_tokens, "<i4").tolist()
    for completion in group.completions:
        made = np.array(mask_of(completion), bool)
        assert 0 < made.sum() <= 36 and not made.all()
        tokens, logprobs = tokens_of(completion), np.array(logprobs_of(completion))
        whole = EngineSample(np.array(tokens, np.int32), logprobs, (), Finish.STOP)
        expected = reference.logprobs(prompt, whole, **filters)
        np.testing.assert_allclose(logprobs[made], expected[made], atol=1e-3)
        assert (logprobs[~made] == 0).all()
        assert spans_of(completion) == [(3, len(tokens))]
    one, other = group.completions
    assert one.tokens != other.tokens


async def test_groups_with_masks_are_accepted_and_trained_on(tmp_path: Path) -> None:
    """A real worker with the transformers engine plays; a real controller and trainer take it."""
    torch.set_num_threads(1)
    model = make_chat_model(tmp_path / "model")
    with running_controllers(
        tmp_path,
        model={"path": str(model), "device": "cpu"},
        data={"chat": True},
        reward={"processes": 0},
        rollout={
            "environment": "examples.environments.guess_number:guess_number",
            "max_tokens": 6,
            "max_context": 128,
            "max_turns": 3,
            "max_sequences": 16,
        },
        # Without skipping, so that every sample is measured.
        train={"steps": 1000, "max_staleness": 1000, "skip_zero_advantage": False},
    ) as controllers:
        config, (address,) = config_of(controllers), addresses(controllers)
        worker = RolloutWorker(config, [address], "rollout-0", "127.0.0.1")
        running = asyncio.create_task(worker.run())
        policy = FakePolicy(config, [address], "policy-0")
        await policy.start()
        training = asyncio.create_task(policy.work(lambda: False))
        handed_in: dict[str, rollout_pb2.Group] = {}
        try:
            await until(lambda: worker.lifecycle.state == worker_pb2.LIFECYCLE_RUNNING)
            put = worker.tasks.outbox.put

            def note(outcome: rollout_pb2.Group | rollout_pb2.ReturnedTask) -> None:
                if isinstance(outcome, rollout_pb2.Group):
                    handed_in[outcome.task.task_id] = outcome
                else:
                    # A lease may have been on its way when the worker was told to leave.
                    assert outcome.reason == "worker_leaving", outcome
                put(outcome)

            worker.tasks.outbox.put = note  # type: ignore[method-assign]
            weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
            await worker.loading.load(StagedWeights(0, weights))
            await until(lambda: policy.timings.steps >= 2)
            worker.lifecycle.leaving.set()
            await asyncio.wait_for(running, 60)
        finally:
            training.cancel()
            worker.lifecycle.stop()
            await asyncio.gather(running, training, return_exceptions=True)
            await policy.stop(goodbye=False)
        report = verify(controllers.redis_url, config.run.name)
        assert report.ok, report.problems
        # Written beside the run, not before it goes on.
        metrics = controllers.run_dir / "metrics.jsonl"
        await until(lambda: metrics.exists() and "\n" in metrics.read_text())
        step = json.loads(metrics.read_text().splitlines()[0])

    trained = [handed_in[task] for task in policy.trained[0][1]]
    batch = decode(trained)
    masks = [np.array(mask_of(c), bool) for group in trained for c in group.completions]
    assert any(not mask.all() for mask in masks), "some guesses were answered"
    assert step["step"] == 1
    assert step["tokens"] == sum(int(mask.sum()) for mask in masks) == batch.trained.sum()
    trainer = Trainer(config, torch.device("cpu"))
    trainer.form(EpochMesh(1, 0, 1, "", "run", ""))
    trainer.restore("", 0, 0)
    keys = [(group.task.task_id, group.task.attempt) for group in trained]
    trainer.begin(StepTotals(1, 0, int(batch.trained.sum()), len(masks)), keys)
    add_groups(trainer, trained)
    stats = trainer.reduce()
    # The same weights on both sides: the trainer finds the log-probs that were sampled with, at
    # every token of every turn, behind tokens that the environment said.
    _, counted, largest = stats.entries["logprob_gap"]
    assert counted == batch.trained.sum() and largest < 1e-3
    trainer.close()
