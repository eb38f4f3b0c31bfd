"""The two halves of a step, each alone on its cores: the ideal of perfect overlap.

    python -m benchmarks.isolated_halves generate ...   the rollout worker's engine and reward
    python -m benchmarks.isolated_halves train ...      the policy worker's step on the same batches

No controller, no Redis, no other process. Used by ``overlap.py`` for the ideal and by
``versus_trl.py`` to split the time. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", choices=["generate", "train"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--batches", type=Path, required=True, help="file of generated batches")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    args = parser.parse_args()

    from paceline.config.load import load_config

    config = load_config(args.config, args.overrides)
    fleet = config.fleet
    threads = fleet.rollout_threads if args.half == "generate" else fleet.policy_threads
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    import torch

    torch.set_num_threads(threads)
    if args.half == "generate":
        clock = asyncio.run(generate(config, args.steps, args.warm_up, args.batches))
    else:
        clock = train(config, args.warm_up, args.batches)
    json.dump(
        {
            "half": args.half,
            "threads": threads,
            "samples_per_s": config.samples_per_step * clock["steps"] / clock["seconds"],
            "cpu_s_per_step": clock["cpu_s"] / clock["steps"],
            "step_s": clock["seconds"] / clock["steps"],
        },
        sys.stdout,
    )
    print()


async def generate(config, steps: int, warm_up: int, out: Path) -> dict[str, float]:
    """Generates and scores ``steps`` batches, a step's groups submitted at once each time."""
    from paceline.dataset.data_order import task_row
    from paceline.dataset.rows import load_rows
    from paceline.prompt_tokenizer import PromptTokenizer
    from paceline.v1 import common_pb2, rollout_pb2
    from rollout_worker.engine import make_engine
    from rollout_worker.engine.base import Finish, Request, SamplingParams

    rows = load_rows(config.data.path, split=config.data.split)
    tokenizer = PromptTokenizer(config)
    engine = make_engine(config, tokenizer)
    await engine.start()
    await engine.load_weights(0, dict(engine_weights(config)))

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
            right = text == row[config.data.answer_field] and sample.finish is Finish.STOP
            message.completions.add(
                tokens=sample.tokens.astype("<i4").tobytes(),
                logprobs=sample.logprobs.astype("<f4").tobytes(),
                versions=[common_pb2.VersionSpan(version=0, length=len(sample.tokens))],
                finish_reason=(
                    rollout_pb2.FINISH_REASON_STOP
                    if sample.finish is Finish.STOP
                    else rollout_pb2.FINISH_REASON_LENGTH
                ),
                reward=float(right),
                text=text,
            )
        return message

    batches = []
    for step in range(warm_up + steps):
        if step == warm_up:
            begun, cpu = time.perf_counter(), time.process_time()
        size = config.train.groups_per_step
        ordinals = range(step * size, (step + 1) * size)
        batches.append(
            rollout_pb2.SubmitRequest(groups=await asyncio.gather(*map(group, ordinals)))
        )
    clock = {
        "steps": steps,
        "seconds": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu,
    }
    await engine.close()
    with out.open("wb") as file:
        for batch in batches:
            data = batch.SerializeToString()
            file.write(len(data).to_bytes(8, "little") + data)
    return clock


def engine_weights(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(config.model.path).named_parameters()


def train(config, warm_up: int, path: Path) -> dict[str, float]:
    """Trains on every batch in the file, as a replica that is alone in its mesh does."""
    import torch

    from paceline.v1 import rollout_pb2
    from policy_worker.objectives.batch import StepTotals
    from policy_worker.trainer import EpochMesh, Trainer
    from testbed.groups_in_hand import add as add_groups

    data, batches = path.read_bytes(), []
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        batches.append(rollout_pb2.SubmitRequest.FromString(data[8:end]).groups)
        data = data[end:]
    trainer = Trainer(config, torch.device("cpu"))
    trainer.restore("", 0, 0)
    trainer.form(EpochMesh(1, 0, 1, "", "alone", "127.0.0.1"))
    for step, groups in enumerate(batches):
        if step == warm_up:
            begun, cpu = time.perf_counter(), time.process_time()
        completions = [c for group in groups for c in group.completions]
        tokens = sum(len(c.tokens) // 4 for c in completions)
        facts = StepTotals(step + 1, step, tokens, len(completions), ((0, 0),))
        trainer.begin(facts, [(g.task.task_id, g.task.attempt) for g in groups])
        add_groups(trainer, groups)
        trainer.reduce()
        trainer.digest()
        trainer.commit(step + 1, config.train.optimizer.lr)
    steps = len(batches) - warm_up
    clock = {
        "steps": steps,
        "seconds": time.perf_counter() - begun,
        "cpu_s": time.process_time() - cpu,
    }
    trainer.close()
    return clock


if __name__ == "__main__":
    main()
