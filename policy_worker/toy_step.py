"""Toy step of six groups on models of 5,000 parameters, computed in any way that a fleet may
choose.

Groups have unequal lengths, tokens of environments, and tokens of several versions, some of them
too old.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from paceline.config.schema import Config
from paceline.ids import Step, Version
from paceline.v1 import common_pb2, rollout_pb2
from policy_worker.model import attention
from policy_worker.model.heads import make_scorer, make_value_head
from policy_worker.model.train_state import TrainState
from policy_worker.objectives.batch import StepTotals, key_of
from policy_worker.objectives.columns import staleness, trained_by_sequence
from policy_worker.objectives.load import load_objective
from policy_worker.objectives.objective import Part
from policy_worker.rows.group_reading import decode
from policy_worker.step.gradients import Gradients
from policy_worker.step.optimizer import build_optimizer

VOCABULARY = 24
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GROUPS, GROUP_SIZE = 6, 4
STEP = 6
OLDEST = 2
TEACHER = "teacher"
"""Scorer whose log-probs the groups have."""
CPU = torch.device("cpu")
Groups = Sequence[rollout_pb2.Group]


class ToyStep:
    def __init__(self, config: Config) -> None:
        attention.register()
        self.config = config
        self.groups = random_groups(np.random.default_rng(7))
        self.objective = load_objective(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.parts = {part.name: _toy_model(part) for part in self.objective.trains}
            self.frozen = {part.name: _toy_model(part) for part in self.objective.frozen}

    def gradient(self, *parts: Groups, **settings: Any) -> Tensor:
        return self.gradient_and_sums(*parts, **settings)[0]

    def gradient_and_sums(self, *parts: Groups, **settings: Any) -> tuple[Tensor, Tensor]:
        """float32 [parameters], and float32 [Objective.summed], of what gradients() adds."""
        gradients = self.gradients(*parts, **settings)
        found = torch.empty(gradients.size)
        gradients.flatten(found)
        gradients.clear()
        sums = gradients.sums_of(found)
        return found[: len(found) - len(sums)], sums

    def gradients(
        self, *parts: Groups, of: Groups | None = None, row_tokens: int = 1 << 20
    ) -> Gradients:
        """Local gradients of the step of ``of``, whose groups are added in ``parts``."""
        train = self.config.train
        memory = train.memory.model_copy(update={"tokens_per_microbatch": row_tokens})
        train = train.model_copy(update={"memory": memory})
        config = self.config.model_copy(update={"train": train})
        numbers = self.objective.scalars.items()
        scalars = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers}
        optimizer = build_optimizer(self.parts, config.train)
        state = TrainState(self.parts, optimizer, Step(0), Version(0), config, scalars)
        gradients = Gradients(state, CPU, self.frozen)
        gradients.clear()
        every = self.groups if of is None else of
        gradients.begin(totals_of(every), [key_of(group) for part in parts for group in part])
        for part in parts:
            gradients.add(part)
        return gradients


def _toy_model(part: Part) -> nn.Module:
    kind: Any = AutoModelForCausalLM if part.head == "lm" else AutoModelForSequenceClassification
    config = AutoConfig.for_model("qwen3", **SHAPE)
    config.num_labels = 1
    model: nn.Module = kind.from_config(config, attn_implementation=attention.BLOCKS)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    (make_scorer if part.head == "lm" else make_value_head)(model)
    return model


def totals_of(groups: Groups, branches: str = "sample") -> StepTotals:
    """Totals as the controller adds them up from the metadata of groups."""
    batch = decode(groups)
    reward, group = batch.reward[batch.firsts], batch.group_of[batch.firsts]
    epochs = ((0, 0),)
    age = staleness(batch.version, STEP, epochs)
    trained = batch.trained * (age <= STEP - 1 - OLDEST)
    counted = trained_by_sequence(trained, batch.units(branches)[1])
    means = np.bincount(group, reward) / batch.samples
    return StepTotals(
        Step(STEP),
        Version(STEP - 1),
        int(trained.sum()),
        int(np.count_nonzero(counted)),
        epochs,
        Step(OLDEST),
        samples=len(reward),
        reward_sum=float(reward.sum()),
        reward_squares=float(((reward - reward.mean()) ** 2).sum()),
        within_squares=float(((reward - means[group]) ** 2).sum()),
    )


def random_groups(
    generator: np.random.Generator, *, gap: float = 0.3, reward: float = 1.0
) -> list[rollout_pb2.Group]:
    """``gap``: scale of the behaviour log-probs; ``reward``: of the rewards, 0 for equal ones."""
    return [
        random_group(generator, f"t{n}", gap=gap, reward=reward, rewarded=n % 2 == 1)
        for n in range(GROUPS)
    ]


def random_group(
    generator: np.random.Generator,
    name: str,
    *,
    gap: float = 0.3,
    reward: float = 1.0,
    versions: Sequence[int] = (0, 3, 4, 5),
    rewarded: bool = False,
) -> rollout_pb2.Group:
    """``rewarded``: some tokens have rewards of their own."""
    prompt = generator.integers(0, VOCABULARY, generator.integers(2, 6))
    group = rollout_pb2.Group(
        task=common_pb2.TaskRef(task_id=name, attempt=1),
        kind=rollout_pb2.TASK_KIND_TRAIN,
        prompt_tokens=prompt.astype("<i4").tobytes(),
    )
    for _ in range(GROUP_SIZE):
        length = int(generator.integers(2, 10))
        first = int(generator.integers(1, length))
        low, high = sorted(int(v) for v in generator.choice(versions, 2))
        # One token in five is an environment's; the first is not.
        mask = (generator.random(length) > 0.2).astype(np.uint8)
        mask[0] = 1
        logprobs = -3.0 + gap * generator.standard_normal(length).clip(-2, 2)
        group.completions.add(
            tokens=generator.integers(0, VOCABULARY, length).astype("<i4").tobytes(),
            logprobs=logprobs.clip(max=-1e-3).astype("<f4").tobytes(),
            loss_mask=mask.tobytes(),
            versions=[
                common_pb2.VersionSpan(version=low, length=first),
                common_pb2.VersionSpan(version=high, length=length - first),
            ],
            reward=reward * float(generator.normal()) if reward else 1.0,
            columns={TEACHER: (logprobs - 0.2).clip(min=-50).astype("<f4").tobytes()},
        )
    if rewarded:
        for completion in group.completions[1:]:
            last = len(completion.loss_mask) - 1
            completion.token_rewards.add(token=0, reward=0.25 * reward)
            completion.token_rewards.add(token=last, reward=-reward / last)
    return group
