"""The TRL side of ``benchmarks.versus_trl``: the demo's task through GRPOTrainer, in one process.

Prints one JSON object. Run in a process of its own, so that the thread count holds from the first
import on. Set up to be as fast as TRL goes here: no gradient checkpointing, no logging inside the
measured stretch, one generation batch an optimizer step, float32 on the CPU.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[2] / "examples" / "digit_sort"

VLLM: dict[str, Any] = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.05,
    "vllm_max_model_length": 128,
}
"""Settings of the trainer for vLLM within its own process, as TRL has it."""


def prepare_vllm() -> None:
    """What TRL 1.16.0 needs to run with vLLM on a CPU at all.

    No process of vLLM's own, into which TRL could not reach to load weights; layers that compute
    with their parameters, since those that CPU kernels have packed cannot be loaded again
    (``'Parameter' object has no attribute 'weight_loader'``); threads that stay unbound; and
    float32, for which TRL has no setting. Compilation and split prompts are off as in Paceline's
    engine: the one takes longer than it saves here, the other fails on CPUs."""
    from paceline.cuda_extensions import hide_cuda_extensions

    hide_cuda_extensions()
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    import functools

    import vllm
    from trl.generation import vllm_generation
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    vllm_generation.LLM = functools.partial(
        vllm.LLM, dtype="float32", enforce_eager=True, enable_chunked_prefill=False
    )


def set_up(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Reads the arguments of either TRL side, and sets up this process before it imports torch."""
    for name in ("model", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("threads", "steps", "warm-up", "groups", "group-size", "max-tokens", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--data", type=Path, default=DEMO / "train.jsonl")
    args = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(args.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    return args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    args = set_up(parser)
    if args.engine == "vllm":
        prepare_vllm()

    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    end = tokenizer.eos_token_id

    def reward(completion_ids: Any, answer: Any, **_: Any) -> list[float]:
        wanted = [[*tokenizer(text)["input_ids"], end] for text in answer]
        got = [list(ids) for ids in completion_ids]
        return [float(a == b) for a, b in zip(got, wanted, strict=True)]

    rewards: list[float] = []

    def recorded(completion_ids: Any, answer: Any, **rest: Any) -> list[float]:
        values = reward(completion_ids, answer, **rest)
        rewards.append(sum(values) / len(values))
        return values

    class Clock(TrainerCallback):
        """Times from the end of the last warm-up step to the end of the last step."""

        start = stop = cpu_start = cpu_stop = 0.0

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            now, cpu = time.perf_counter(), time.process_time()
            if state.global_step == args.warm_up:
                self.start, self.cpu_start = now, cpu
            self.stop, self.cpu_stop = now, cpu

    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=args.groups * args.group_size,
            gradient_accumulation_steps=1,
            num_generations=args.group_size,
            max_completion_length=args.max_tokens,
            max_steps=args.steps,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            beta=0.0,
            temperature=1.0,
            loss_type="dapo",
            gradient_checkpointing=False,
            disable_dropout=True,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=args.seed,
            **(VLLM if args.engine == "vllm" else {}),
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=recorded,
            args=config,
            train_dataset=datasets.Dataset.from_json(str(args.data)),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    seconds = clock.stop - clock.start
    samples = (args.steps - args.warm_up) * args.groups * args.group_size
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    json.dump(
        {
            "threads": args.threads,
            "seconds": seconds,
            "samples": samples,
            "samples_per_s": samples / seconds,
            "cpu_s": clock.cpu_stop - clock.cpu_start,
            "reward_first5": sum(rewards[:5]) / 5,
            "reward_last5": sum(rewards[-5:]) / 5,
        },
        sys.stdout,
    )
    print()


if __name__ == "__main__":
    main()
