"""A whole training in one process, of a trainer and an engine that does not have its weights.

    trainer ──► weights ──► noise ──► TransformersEngine ──► samples, their log-probs
       ▲                                                          │ reward
       └──────────── begin, add, reduce, commit ◄── groups ◄──────┘

Everything between is what a run uses. The engine reports the log-probs that it sampled from, as any
engine does whose arithmetic is not the trainer's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.v1 import common_pb2, rollout_pb2
from policy_worker.gradients import StepFacts
from policy_worker.trainer import Epoch, Trainer
from rollout_worker.engine.base import Engine, Request, SamplingParams
from rollout_worker.groups import group_message
from rollout_worker.scoring import Scores
from rollout_worker.tokenizer import PromptTokenizer
from tests.helpers.engines import make_test_engine
from tests.helpers.policy_models import make_config

GROUPS, GROUP, LENGTH = 8, 8, 6
"""Prompts of a step, completions of a prompt, tokens of a completion."""
LOOK_EVERY = 5
"""Steps."""


@dataclass
class Learned:
    own: list[float] = field(default_factory=list)
    """Mean reward of what the trainer's own weights, without noise, say after every LOOK_EVERY steps."""
    gap: list[float] = field(default_factory=list)
    """logprob_gap of each step: trainer against engine."""

    @property
    def end(self) -> float:
        """Mean reward of the trainer's own weights over the last third."""
        return float(np.mean(self.own[-(len(self.own) // 3) :]))


async def train_against(
    model: Path,
    reward: Callable[[str], float],
    *,
    noise: float,
    steps: int,
    seed: int = 0,
    **train: Any,
) -> Learned:
    """``noise``: see perturbed. ``train``: fields of the section. ``model``: has no end token, so that
    all completions have LENGTH tokens."""
    config = make_config(
        model=model,
        train={"steps": steps, "groups_per_step": GROUPS, **train},
        rollout={"group_size": GROUP, "max_tokens": LENGTH, "max_sequences": GROUPS * GROUP},
    )
    trainer = Trainer(config, torch.device("cpu"))
    trainer.form(Epoch(1, 0, 1, "", "run", ""), lambda: False)
    trainer.restore("", 0, 0)
    engine = make_test_engine("lean", config)
    await engine.start()
    tokenizer = PromptTokenizer(config)
    noises, prompts = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    learned = Learned()
    try:
        for step in range(1, steps + 1):
            weights = perturbed(trainer.state.named_weights(), noise, noises)
            await engine.load_weights(step - 1, weights)
            groups = await _groups(engine, tokenizer, reward, prompts, f"train-{step}")
            tokens = sum(len(c.tokens) // 4 for g in groups for c in g.completions)
            facts = StepFacts(step, step - 1, tokens, GROUPS * GROUP)
            trainer.begin(facts, [(g.task.task_id, g.task.attempt) for g in groups])
            trainer.add(groups)
            learned.gap.append(trainer.reduce().mean("logprob_gap"))
            trainer.commit(step)
            if step % LOOK_EVERY == 0:
                await engine.load_weights(step, dict(trainer.state.named_weights()))
                groups = await _groups(engine, tokenizer, reward, prompts, f"look-{step}")
                rewards = [c.reward for g in groups for c in g.completions]
                learned.own.append(float(np.mean(rewards)))
    finally:
        await engine.close()
        trainer.close()
    return learned


def perturbed(
    weights: Iterable[tuple[str, Tensor]], noise: float, draw: torch.Generator
) -> dict[str, Tensor]:
    """Every matrix with Gaussian noise of ``noise`` times its own standard deviation added."""
    return {
        name: w + noise * w.std() * torch.randn(w.shape, generator=draw) if w.dim() > 1 else w
        for name, w in weights
    }


async def _groups(
    engine: Engine,
    tokenizer: PromptTokenizer,
    reward: Callable[[str], float],
    prompts: np.random.Generator,
    name: str,
) -> list[rollout_pb2.Group]:
    """One for each of GROUPS random prompts of three digits."""
    texts = ["s" + "".join(map(str, prompts.integers(0, 10, 3))) + "=" for _ in range(GROUPS)]
    opened = [tokenizer.opening(text) for text in texts]
    seeds = prompts.integers(0, 1 << 62, GROUPS).tolist()
    requests = [
        Request(
            f"{name}.{i}", prompt.tokens, SamplingParams(max_tokens=LENGTH, seed=seed), count=GROUP
        )
        for i, (prompt, seed) in enumerate(zip(opened, seeds, strict=True))
    ]
    groups = []
    answers = await asyncio.gather(*map(engine.generate, requests))
    for request, prompt, samples in zip(requests, opened, answers, strict=True):
        said = tokenizer.decode_many([sample.tokens for sample in samples])
        lease = rollout_pb2.Lease(
            task=common_pb2.TaskRef(task_id=request.request_id, attempt=1),
            kind=rollout_pb2.TASK_KIND_TRAIN,
        )
        scores = Scores([reward(text) for text in said], [{} for _ in said], 0.0)
        groups.append(group_message(lease, prompt, samples, said, scores, generate_s=0.0))
    return groups
