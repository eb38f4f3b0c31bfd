"""The two halves of a step, each alone on its cores: the ideal of perfect overlap.

    python -m benchmarks.isolated_halves generate ...   the rollout worker's engine and reward
    python -m benchmarks.isolated_halves train ...      the policy worker's step on the same batches

No controller, no Redis, no other process. ``overlap.py`` starts it, with one thread, for the ideal.
Prints one JSON object.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.dataset.data_order import task_row
from paceline.dataset.rows import load_rows
from paceline.prompt_tokenizer import PromptTokenizer
from paceline.v1 import common_pb2, rollout_pb2
from policy_worker.objectives.batch import StepTotals
from policy_worker.trainer import EpochMesh, Trainer
from rollout_worker.engine import make_engine
from rollout_worker.engine.base import Finish, Request, SamplingParams
from testbed.groups_in_hand import add as add_groups


class Clock:
    """Wall and CPU seconds since it was started."""

    def start(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        began, cpu = self._began
        return time.perf_counter() - began, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("half", choices=["generate", "train"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--batches", type=Path, required=True, help="file of generated batches")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(args.config, args.overrides)
    if args.half == "generate":
        seconds, cpu_s = asyncio.run(generate(config, args.steps, args.warm_up, args.batches))
    else:
        seconds, cpu_s = train(config, args.warm_up, args.batches)
    found = {
        "half": args.half,
        "samples_per_s": config.samples_per_step * args.steps / seconds,
        "cpu_s_per_step": cpu_s / args.steps,
        "step_s": seconds / args.steps,
    }
    print(json.dumps(found))


async def generate(config: Config, steps: int, warm_up: int, out: Path) -> tuple[float, float]:
    """Generates and scores ``steps`` batches, a step's groups submitted at once each time."""
    rows = load_rows(config.data.path, split=config.data.split)
    tokenizer = PromptTokenizer(config)
    engine = make_engine(config, tokenizer)
    await engine.start()
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    await engine.load_weights(0, dict(model.named_parameters()))

    async def group(ordinal: int) -> rollout_pb2.Group:
        _, index = task_row(config.run.seed, ordinal, len(rows), config.data.shuffle)
        row = rows[index]
        prompt = tokenizer.prompt(row).tokens
        params = SamplingParams(config.rollout.max_tokens, config.rollout.temperature, seed=ordinal)
        request = Request(f"t{ordinal}", prompt, params, config.rollout.group_size)
        samples = await engine.generate(request)
        texts = tokenizer.decode_many([sample.tokens for sample in samples])
        message = rollout_pb2.Group(
            task=common_pb2.TaskRef(task_id=f"t{ordinal}", attempt=1),
            kind=rollout_pb2.TASK_KIND_TRAIN,
            prompt_tokens=prompt.astype("<i4").tobytes(),
        )
        for sample, text in zip(samples, texts, strict=True):
            stopped = sample.finish is Finish.STOP
            message.completions.add(
                tokens=sample.tokens.astype("<i4").tobytes(),
                logprobs=sample.logprobs.astype("<f4").tobytes(),
                versions=[common_pb2.VersionSpan(version=0, length=len(sample.tokens))],
                finish_reason="FINISH_REASON_STOP" if stopped else "FINISH_REASON_LENGTH",
                reward=float(stopped and text == row[config.data.answer_field]),
                text=text,
            )
        return message

    clock, batches = Clock(), []
    for step in range(warm_up + steps):
        if step == warm_up:
            clock.start()
        size = config.train.groups_per_step
        ordinals = range(step * size, (step + 1) * size)
        batches.append(await asyncio.gather(*map(group, ordinals)))
    took = clock.read()
    await engine.close()
    with out.open("wb") as file:
        for groups in batches:
            data = rollout_pb2.Groups(groups=groups).SerializeToString()
            file.write(len(data).to_bytes(8, "little") + data)
    return took


def read_batches(path: Path) -> Iterator[list[rollout_pb2.Group]]:
    data = path.read_bytes()
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        yield list(rollout_pb2.Groups.FromString(data[8:end]).groups)
        data = data[end:]


def train(config: Config, warm_up: int, path: Path) -> tuple[float, float]:
    """Trains on every batch in the file, as a replica that is alone in its mesh does."""
    trainer = Trainer(config, torch.device("cpu"))
    trainer.restore("", 0, 0)
    trainer.form(EpochMesh(1, 0, 1, "", "alone", "127.0.0.1"))
    clock = Clock()
    for step, groups in enumerate(read_batches(path)):
        if step == warm_up:
            clock.start()
        completions = [c for group in groups for c in group.completions]
        tokens = sum(len(c.tokens) // 4 for c in completions)
        totals = StepTotals(step + 1, step, tokens, len(completions), ((0, 0),))
        trainer.begin(totals, [(g.task.task_id, g.task.attempt) for g in groups])
        add_groups(trainer, groups)
        trainer.reduce()
        trainer.digest()
        trainer.commit(step + 1, config.train.optimizer.lr)
    took = clock.read()
    trainer.close()
    return took


if __name__ == "__main__":
    main()
