"""The asynchronous TRL side of ``benchmarks.versus_trl``: AsyncGRPOTrainer, its rollout process and
a vLLM server on the CPU. Prints one JSON object.

As it is, TRL 1.16.0's AsyncGRPOTrainer does not run on a CPU. Three things stop it, and each has a
stand-in here, so what is measured is TRL's schedule, queue and losses, not TRL as users have it:

- Its constructor asks for the name of the CUDA device, for the share of peak FLOPs. Here it gets
  none, which it knows as an unknown device.
- Its attention is a FlashAttention-3 kernel for GPUs, downloaded from the hub (``tree_fa3``), and
  no argument chooses another. Here the same function over torch's attention, rows padded.
- Its weights go to vLLM over NCCL. Here, through its ``weight_transfer`` argument, they are written
  to a file (0.4 MB, 3 MB) that the server reloads, between the same pause and resume.

The demo's tokenizer has no templates of chats and responses, which it insists on: here ones that
change nothing.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.versus_trl.trl_trainer import set_up

MAX_MODEL_LEN = 128
START_LIMIT_S = 600.0
LIMIT_S = 1200


def exact(completion_ids: list[list[int]], wanted: list[list[int]], **_: Any) -> list[float]:
    """The reward, on a level that the rollout process can import."""
    return [float(list(a) == list(b)) for a, b in zip(completion_ids, wanted, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lag", type=int, default=2, help="max_staleness")
    parser.add_argument("--in-flight", type=int, default=-1, help="max_inflight_tasks")
    args = set_up(parser)
    from paceline.cuda_extensions import hide_cuda_extensions

    hide_cuda_extensions()
    # If its rollout process fails, the trainer may wait for ever.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(LIMIT_S)
    with tempfile.TemporaryDirectory() as scratch, served(args.model, Path(scratch)) as url:
        json.dump(train(args, url, Path(scratch)), sys.stdout)
        print()


@contextlib.contextmanager
def served(model: Path, scratch: Path) -> Iterator[str]:
    """Address of vLLM's server as AsyncGRPOTrainer asks for it, but for the transfer of weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Not ``vllm serve``, which asks for the metadata of a package that the CPU wheel is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "256"]
    command += ["--max-model-len", str(MAX_MODEL_LEN), "--gpu-memory-utilization", "0.05"]
    command += ["--logprobs-mode", "processed_logprobs"]
    command += ["--enforce-eager", "--no-enable-chunked-prefill"]
    command += ["--max-num-batched-tokens", "4096"]
    command += ["--worker-extension-cls", "benchmarks.versus_trl.unpacked_rank.UnpackedRank"]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TORCHDYNAMO_DISABLE": "1",
    }
    url = f"http://127.0.0.1:{port}"
    with (scratch / "server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_for(url, server)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
            sys.stderr.write((scratch / "server.log").read_text()[-3000:])


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Returns once the server answers. Raises RuntimeError if it has ended, or takes too long."""
    import requests

    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(requests.RequestException):
            if requests.get(f"{url}/health", timeout=5).ok:
                return
        time.sleep(0.5)
    raise RuntimeError("vLLM's server did not start")


def train(args: argparse.Namespace, url: str, scratch: Path) -> dict[str, Any]:
    import datasets
    import psutil
    import requests
    import torch
    from transformers import AutoTokenizer, TrainerCallback
    from trl.experimental.async_grpo import (
        AsyncGRPOConfig,
        AsyncGRPOTrainer,
        async_grpo_trainer,
        packing,
    )
    from trl.experimental.async_grpo.vllm_client import VLLMClient

    torch.set_num_threads(args.threads)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    # No answer of digits is a call of a tool: all of it is content.
    tokenizer.response_template = {"defaults": {"role": "assistant"}}
    end = tokenizer.eos_token_id
    rows = [json.loads(line) for line in args.data.read_text().splitlines()]
    data = datasets.Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "wanted": [*tokenizer(row["answer"])["input_ids"], end],
            }
            for row in rows
        ]
    )

    class ThroughFile:
        """Weights to the server through a file."""

        def __init__(self) -> None:
            self.client = VLLMClient(url)

        def init_weight_transfer(self) -> None:
            self.client.wait_for_server_ready()
            for name in ("config.json", "generation_config.json"):
                (scratch / name).write_text((args.model / name).read_text())

        def pause(self) -> None:
            self.client.pause()

        def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
            from safetensors.torch import save_file

            tensors = {name: tensor.contiguous().clone() for name, tensor in iterator}
            save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
            call: dict[str, Any] = {
                "method": "reload_weights",
                "kwargs": {"weights_path": str(scratch)},
            }
            requests.post(f"{url}/collective_rpc", json=call, timeout=300).raise_for_status()

        def resume(self) -> None:
            self.client.resume()

        def destroy(self) -> None:
            pass

    def cpu_s() -> float:
        """CPU seconds of this process, the server and the rollout process."""
        here = psutil.Process()
        used = 0.0
        for process in [here, *here.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                used += sum(process.cpu_times()[:2])
        return used

    class Clock(TrainerCallback):
        """Times from the end of the last warm-up step to the end of the last step."""

        start = stop = cpu_start = cpu_stop = 0.0

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == args.warm_up:
                self.start, self.cpu_start = time.perf_counter(), cpu_s()
            if state.global_step == args.steps:
                self.stop, self.cpu_stop = time.perf_counter(), cpu_s()
                # Its own log at the end empties them.
                measured.update({n: list(v) for n, v in trainer._metrics["train"].items()})

    measured: dict[str, list[float]] = {}
    clock = Clock()
    samples = args.groups * args.group_size
    config = AsyncGRPOConfig(
        output_dir=str(scratch / "out"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=samples,
        gradient_accumulation_steps=1,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        token_budget=-1,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        max_staleness=args.lag,
        max_inflight_tasks=args.in_flight,
        weight_sync_steps=1,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        vllm_server_base_url=url,
        seed=args.seed,
    )
    trainer = AsyncGRPOTrainer(
        model=str(args.model),
        reward_funcs=exact,
        args=config,
        train_dataset=data.shuffle(seed=args.seed),
        processing_class=tokenizer,
        callbacks=[clock],
        weight_transfer=ThroughFile(),
    )
    trainer.train()
    trainer.model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    seconds = clock.stop - clock.start
    counted = (args.steps - args.warm_up) * samples
    stale = measured.get("sample/staleness_mean") or [0.0]
    rewards = measured.get("reward") or [0.0]
    return {
        "threads": args.threads,
        "seconds": seconds,
        "samples": counted,
        "samples_per_s": counted / seconds,
        "cpu_s": clock.cpu_stop - clock.cpu_start,
        "staleness_mean": sum(stale) / len(stale),
        "dropped_stale": sum(measured.get("sample/dropped_stale_total") or [0.0]),
        "reward_last5": sum(rewards[-5:]) / len(rewards[-5:]),
    }


def attention(
    query: Any,
    key: Any,
    value: Any,
    starts_q: Any,
    starts_k: Any,
    longest_q: int,
    longest_k: int,
    *,
    softmax_scale: float | None = None,
    **_: Any,
) -> Any:
    """What FlashAttention's function of variable lengths returns, [N, H, D], of query [N, H, D] and
    key and value [M, G, D]: causal, the ends of queries and keys of a segment aligned."""
    import torch

    def padded(starts: Any, longest: int) -> tuple[Any, Any]:
        """[S, longest]: places of each segment, aligned at its end, and whether they are real."""
        before_end = torch.arange(longest, 0, -1)
        return (starts[1:, None] - before_end).clamp(min=0), before_end <= starts.diff()[:, None]

    at_q, real_q = padded(starts_q, longest_q)
    at_k, real_k = padded(starts_k, longest_k)
    before = torch.arange(longest_k, 0, -1) >= torch.arange(longest_q, 0, -1)[:, None]
    # A padded query sees everything: a row without any key has no softmax.
    seen = (before & real_k[:, None]) | ~real_q[..., None]
    made = torch.nn.functional.scaled_dot_product_attention(
        query[at_q].transpose(1, 2),
        key[at_k].transpose(1, 2),
        value[at_k].transpose(1, 2),
        attn_mask=seen[:, None],
        scale=softmax_scale,
        enable_gqa=True,
    )
    return made.transpose(1, 2)[real_q]


if __name__ == "__main__":
    main()
