"""Environments of a rollout worker without the worker: leases in, groups out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from controller.ledger.commands import GroupFacts
from controller.validation import GroupLimits, check_group
from paceline.config.schema import Config
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.environments.base import Environment, Sample, Task
from rollout_worker.environments.runner import Environments
from rollout_worker.held import HeldTask
from rollout_worker.scoring import Scorer
from rollout_worker.tokenizer import PromptTokenizer
from tests.helpers.talking_engine import Speaker, TalkingEngine

NAME = "tests.helpers.environment_stage:delegate"
_current: list[Environment] = []


async def delegate(task: Task, sample: Sample) -> Any:
    """The environment that the newest stage was given."""
    return await _current[-1](task, sample)


def stage_config(model: Path, **rollout: Any) -> Config:
    sections = {name: rollout.pop(name) for name in ("data", "reward", "train") if name in rollout}
    return Config.model_validate(
        {
            "model": {"path": str(model), "device": "cpu"},
            "data": {"path": "unused", "max_prompt_tokens": 120, **sections.get("data", {})},
            "reward": {"processes": 0, **sections.get("reward", {})},
            # So that a group may have one completion.
            "train": {"kl_coef": 0.1, **sections.get("train", {})},
            "rollout": {
                "group_size": 2,
                "max_tokens": 40,
                "max_context": 400,
                "environment": NAME,
                "environment_timeout_s": 20.0,
                **rollout,
            },
        }
    )


def lease_of(
    row: dict[str, Any] | None = None, *, count: int = 2, task_id: str = "t0", seed: int = 7
) -> rollout_pb2.Lease:
    return rollout_pb2.Lease(
        task=common_pb2.TaskRef(task_id=task_id, attempt=1),
        kind=rollout_pb2.TASK_KIND_EVAL if task_id[0] == "e" else rollout_pb2.TASK_KIND_TRAIN,
        row_json=json.dumps(row or {"prompt": "begin", "answer": "7"}),
        seed=seed,
        group_size=count,
    )


class Stage:
    def __init__(self, config: Config, environments: Environments, engine: TalkingEngine) -> None:
        self.config = config
        self.environments = environments
        self.engine = engine

    async def produce(self, lease: rollout_pb2.Lease) -> Any:
        return await self.environments.produce(HeldTask(lease))

    async def group(self, lease: rollout_pb2.Lease | None = None) -> rollout_pb2.Group:
        """The lease's group, which the controller's checks let pass."""
        group = await self.produce(lease or lease_of(count=self.config.rollout.group_size))
        assert isinstance(group, rollout_pb2.Group), group
        self.facts(group)
        return group

    def facts(self, group: rollout_pb2.Group) -> GroupFacts:
        return check_group(group, GroupLimits.of(self.config), 1000)

    async def refusal(self, lease: rollout_pb2.Lease | None = None) -> rollout_pb2.ReturnedTask:
        """Why the lease has no group."""
        returned = await self.produce(lease or lease_of())
        assert isinstance(returned, rollout_pb2.ReturnedTask), returned
        return returned


@asynccontextmanager
async def staged(
    model: Path, environment: Environment, speaker: Speaker, **rollout: Any
) -> AsyncIterator[Stage]:
    """``speaker``: see TalkingEngine. Weights of version 3 are loaded."""
    config = stage_config(model, **rollout)
    engine = TalkingEngine(speaker, context=config.rollout.max_context or 400)
    engine.tokenizer = PromptTokenizer(config)
    await engine.load_weights(3, {})
    async with stage_of(config, environment, engine) as stage:
        yield stage


@asynccontextmanager
async def stage_of(config: Config, environment: Environment, engine: Any) -> AsyncIterator[Stage]:
    """``engine``: started, with weights."""
    tokenizer = PromptTokenizer(config)
    tokenizer.limit = min(config.data.max_prompt_tokens, engine.max_context - 1)
    _current.append(environment)
    scorer = Scorer(config.reward)
    environments = Environments(config, tokenizer)
    try:
        await scorer.start()
        await environments.start(engine, scorer)
        yield Stage(config, environments, engine)
    finally:
        await environments.close()
        await scorer.close()
        _current.pop()


def tokens_of(completion: rollout_pb2.Completion) -> list[int]:
    return np.frombuffer(completion.tokens, "<i4").tolist()


def logprobs_of(completion: rollout_pb2.Completion) -> list[float]:
    return np.frombuffer(completion.logprobs, "<f4").tolist()


def mask_of(completion: rollout_pb2.Completion) -> list[int]:
    return list(completion.loss_mask) or [1] * (len(completion.tokens) // 4)


def spans_of(completion: rollout_pb2.Completion) -> list[tuple[int, int]]:
    return [(span.version, span.length) for span in completion.versions]
