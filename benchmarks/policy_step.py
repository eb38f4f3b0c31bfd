"""Cost of a training step: packed rows with shared prompts against the usual padded batch.

    OMP_NUM_THREADS=1 python benchmarks/policy_step.py [--steps 20] [--json FILE]

One process, no controller and no mesh: decode groups, advantages, forward, loss, backward, clip,
AdamW. Both use the same groups, model and thread count, one after the other in one run. Prompts
have 6 to 14 tokens and completions 4 to 16 (10 on average), padded to 24: the sizes of the
digit-sort demo. "no skipping" trains every sequence. By default sequences with zero advantage are
skipped, which does not change the gradient (here 40 % of the groups, as late in the demo). Times
are CPU seconds of the process, so that a busy machine does not distort them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.config.schema import Config
from paceline.v1 import common_pb2, rollout_pb2
from policy_worker.model import attention
from policy_worker.model.heads import make_scorer
from policy_worker.model.train_state import TrainState
from policy_worker.objectives.batch import StepTotals
from policy_worker.step.gradients import Gradients
from policy_worker.step.optimizer import build_optimizer

GROUPS, GROUP_SIZE, PADDED_COMPLETION, VOCAB = 32, 8, 24, 15
SIZES = {"0.1 M": (64, 2), "0.8 M": (160, 3)}
UNIFORM_SHARE = 0.4


def make_model(hidden: int, layers: int) -> Qwen3ForCausalLM:
    attention.register()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def make_groups() -> list[rollout_pb2.Group]:
    rng = np.random.default_rng(0)
    groups = []
    for g in range(GROUPS):
        group = rollout_pb2.Group(
            task=common_pb2.TaskRef(task_id=f"t{g}", attempt=1),
            prompt_tokens=rng.integers(0, VOCAB, rng.integers(6, 15)).astype("<i4").tobytes(),
        )
        uniform = g % 10 < UNIFORM_SHARE * 10
        for c in range(GROUP_SIZE):
            n = int(rng.integers(4, 17))
            group.completions.add(
                tokens=rng.integers(0, VOCAB, n).astype("<i4").tobytes(),
                logprobs=np.full(n, -2.7, "<f4").tobytes(),
                versions=[common_pb2.VersionSpan(version=0, length=n)],
                reward=1.0 if uniform else float(c % 2),
            )
        groups.append(group)
    return groups


def packed_step(
    model: Qwen3ForCausalLM, groups: list[rollout_pb2.Group], skip: bool
) -> Callable[[int], None]:
    config = Config.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"path": "unused"},
            "train": {"optimizer": {"lr": 1e-5}, "loss": {"skip_zero_advantage": skip}},
        }
    )
    model.set_attn_implementation(attention.NAME)
    make_scorer(model)
    optimizer = build_optimizer({"policy": model}, config.train)
    gradients = Gradients(
        TrainState({"policy": model}, optimizer, 0, 0, config), torch.device("cpu")
    )
    keys = [(g.task.task_id, g.task.attempt) for g in groups]
    tokens = sum(len(c.tokens) // 4 for g in groups for c in g.completions)
    wire = [g.SerializeToString() for g in groups]

    def step(number: int) -> None:
        arrived = [rollout_pb2.Group.FromString(data) for data in wire]
        gradients.begin(StepTotals(number, 0, tokens, GROUPS * GROUP_SIZE), keys)
        gradients.add(arrived)
        torch.nn.utils.clip_grad_norm_(gradients.parameters, 1.0)
        optimizer.step()
        gradients.clear()

    return step


def padded_step(model: Qwen3ForCausalLM, groups: list[rollout_pb2.Group]) -> Callable[[int], None]:
    """Prompts padded on the left, completions on the right, one batch, logits of the completion."""
    model.set_attn_implementation("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    prompts = [np.frombuffer(g.prompt_tokens, "<i4") for g in groups for _ in g.completions]
    answers = [np.frombuffer(c.tokens, "<i4") for g in groups for c in g.completions]
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), longest + PADDED_COMPLETION, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[row, longest - len(prompt) : longest] = torch.tensor(prompt)
        ids[row, longest : longest + len(answer)] = torch.tensor(answer)
        mask[row, longest - len(prompt) : longest + len(answer)] = 1
    real = mask[:, longest:].float()
    advantage = torch.randn(len(prompts), 1)

    def step(number: int) -> None:
        logits = model(
            input_ids=ids, attention_mask=mask, logits_to_keep=PADDED_COMPLETION + 1
        ).logits[:, :-1]
        logp = torch.log_softmax(logits, -1).gather(2, ids[:, longest:, None])[..., 0]
        ratio = (logp - logp.detach()).exp()
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        (-(objective * real).sum() / real.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def samples_per_cpu_second(step: Callable[[int], None], steps: int) -> float:
    for number in range(3):
        step(number + 1)
    begun = time.process_time()
    for number in range(steps):
        step(number + 4)
    return GROUPS * GROUP_SIZE * steps / (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    groups = make_groups()
    results = []
    for name, (hidden, layers) in SIZES.items():
        rates = {
            "padded": samples_per_cpu_second(
                padded_step(make_model(hidden, layers), groups), options.steps
            ),
            "packed, no skipping": samples_per_cpu_second(
                packed_step(make_model(hidden, layers), groups, skip=False), options.steps
            ),
            "packed": samples_per_cpu_second(
                packed_step(make_model(hidden, layers), groups, skip=True), options.steps
            ),
        }
        parameters = sum(p.numel() for p in make_model(hidden, layers).parameters())
        results.append({"model": name, "parameters": parameters, **rates})
    table = Table(title="training alone, samples per CPU second, 1 thread")
    for column in results[0]:
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(*(f"{v:,.0f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
