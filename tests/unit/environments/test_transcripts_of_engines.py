"""Environments on real engines: what rollout workers hand in is what trainers train on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config.schema import Config
from paceline.v1 import rollout_pb2
from policy_worker.trainer import Trainer
from rollout_worker.engine.base import Completion as EngineSample
from rollout_worker.engine.base import Finish
from rollout_worker.environments.base import EnvironmentTask, Sample
from testbed.groups_in_hand import add as add_groups
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
from tests.fixtures.training_steps import begin, form_alone


async def three_turns(task: EnvironmentTask, sample: Sample) -> float:
    turn = await sample(task.prompt)
    for said in ("And then?", "And now?"):
        assert turn.room > 0
        turn = await sample([{"role": "user", "content": said}])
    return float(task.index)


def chat_config(model: Path, **changes: Any) -> Config:
    lengths = {"max_tokens": 12, "max_context": 256, "max_sequences": 8}
    return stage_config(model, data={"chat": True}, **lengths, **changes)


async def played(config: Config, kind: str, reference: Reference) -> rollout_pb2.Group:
    engine = make_test_engine(kind, config)
    await engine.start()
    try:
        await engine.load_weights(3, dict(reference.model.named_parameters()))
        async with stage_of(config, three_turns, engine) as stage:
            return await stage.group()
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", each_engine(pytest.mark.slow))
async def test_log_probs_of_every_turn_are_those_behind_the_whole_transcript(
    tmp_path: Path, kind: str
) -> None:
    """On every engine, at temperatures and filters that shape the distribution. What continues a
    prefix in vLLM in every run: tests/unit/engine/test_engine.py."""
    torch.set_num_threads(1)
    model = make_chat_model(tmp_path, hidden=128)
    reference = Reference(model)
    filters = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    name = "vllm" if kind == "vllm" else "transformers"
    group = await played(chat_config(model, engine=name, **filters), kind, reference)
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


async def test_a_trainer_finds_the_log_probs_of_every_turn(tmp_path: Path) -> None:
    """At every token of every turn, behind tokens that the environment said."""
    torch.set_num_threads(1)
    model = make_chat_model(tmp_path)
    config = chat_config(model, train={"loss": {"skip_zero_advantage": False}})
    group = await played(config, "fused", Reference(model))
    trainer = Trainer(config, torch.device("cpu"))
    form_alone(trainer)
    trainer.restore("", 0, 0)
    begin(trainer, [group])
    add_groups(trainer, [group])
    _, counted, largest = trainer.reduce().entries["logprob_gap"]
    assert counted == sum(sum(mask_of(completion)) for completion in group.completions)
    assert largest < 1e-3
    trainer.close()
