"""Generation and weight swaps of the engines, and a communicator of one rank."""

import asyncio
import gc
import importlib.util
import itertools
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu_check.models import Shape, make_model
from paceline.config.schema import Config
from paceline.mesh.gloo_backend import GlooBackend
from paceline.mesh.nccl_backend import NcclBackend
from paceline.mesh.rendezvous import MeshMember
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import Engine, Request, SamplingParams
from rollout_worker.engine.choice import make_engine
from testbed.tiny_model import make_tiny_model

SEQUENCES, PROMPT = 64, 128
COLLECTIVE_BYTES = 64 << 20


def write_model(shape: Shape, device: torch.device, path: Path) -> Path:
    """Random weights in bfloat16, with the tokenizer of the tests."""
    make_tiny_model(path)
    make_model(shape, device).to(torch.bfloat16).save_pretrained(path)  # type: ignore[operator]
    return path


def engines(device: torch.device, shape: Shape, tokens: int) -> list[dict[str, Any]]:
    """Tokens per second of 64 sequences of ``tokens`` new tokens, by themselves and while weights
    are swapped: with decode steps as CUDA graphs, without, and in vLLM."""
    ways = engines_here(device)
    if device.type == "cuda":
        ways["transformers, no CUDA graphs"] = {"cuda_graphs": False}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-check-") as name:
        path = write_model(shape, device, Path(name))
        for way, settings in ways.items():
            config = engine_config(path, device, {"max_tokens": tokens, **settings})
            rows.append({"engine": way, **asyncio.run(_served(config, shape, device))})
            gc.collect()
    return rows if "vllm" in ways else [*rows, WITHOUT_VLLM]


WITHOUT_VLLM = {"engine": "vllm", "left out": "no GPU, or no vLLM"}


def engines_here(device: torch.device) -> dict[str, dict[str, Any]]:
    """Settings in [rollout] of the engines that this machine can run."""
    on_gpu = device.type == "cuda" and importlib.util.find_spec("vllm") is not None
    return {"transformers": {}} | ({"vllm": {"engine": "vllm"}} if on_gpu else {})


def engine_config(
    path: Path, device: torch.device, settings: dict[str, Any], **fleet: Any
) -> Config:
    """``settings``: in [rollout]."""
    return Config.model_validate(
        {
            "model": {"path": str(path), "device": device.type, "dtype": "bfloat16"},
            "data": {"path": "unused", "max_prompt_tokens": PROMPT},
            "rollout": {"max_sequences": SEQUENCES, **settings},
            "fleet": fleet,
        }
    )


async def _served(config: Config, shape: Shape, device: torch.device) -> dict[str, Any]:
    engine = make_engine(config, PromptTokenizer(config))
    begun = time.perf_counter()
    await engine.start()
    started = time.perf_counter() - begun
    try:
        weights = dict(make_model(shape, device).to(torch.bfloat16).named_parameters())
        first = await engine.load_weights(0, weights)  # all parameters are compared
        limit = config.rollout.max_tokens
        await _tokens_per_s(engine, shape, limit)  # compiles, and captures graphs
        alone = await _tokens_per_s(engine, shape, limit)
        swapping = asyncio.create_task(_tokens_per_s(engine, shape, limit))
        pauses = []
        while not swapping.done():
            pauses.append(await engine.load_weights(engine.version + 1, weights))
            await asyncio.wait([swapping], timeout=1.0)
        return {
            "model": shape.name,
            "start, s": started,
            "tokens/s": alone,
            "ms a token of all": SEQUENCES / alone * 1e3,
            "first swap, ms": first * 1e3,
            "swap while it generates, ms": sorted(pauses)[len(pauses) // 2] * 1e3,
            "tokens/s with a swap a second": await swapping,
        }
    finally:
        await engine.close()


async def _tokens_per_s(engine: Engine, shape: Shape, limit: int) -> float:
    prompt = np.random.default_rng(0).integers(3, shape.vocabulary, PROMPT).astype(np.int32)
    begun = time.perf_counter()
    request = Request(f"{begun}", prompt, SamplingParams(limit), SEQUENCES)
    made = sum(len(completion.tokens) for completion in await engine.generate(request))
    return made / (time.perf_counter() - begun)


class _Alone:
    """A rendezvous of one member."""

    def __init__(self) -> None:
        self.said: dict[str, dict[str, bytes]] = {}

    def speak(self, topic: str, name: str, value: bytes, size: int) -> None:
        self.said.setdefault(topic, {})[name] = value

    def hear(self, topic: str, size: int) -> dict[str, bytes]:
        return self.said[topic]

    def exchange(self, topic: str, rank: int, value: bytes, size: int) -> list[bytes]:
        return [value]


def communicator(device: torch.device) -> list[dict[str, Any]]:
    """What a mesh does with NCCL, with one rank: connect, reduce, abort; twice, as the first one of
    a process also loads the library. Without a GPU the same is done with gloo."""
    kind = NcclBackend if device.type == "cuda" else GlooBackend
    if kind is NcclBackend and not dist.is_nccl_available():
        return [{"left out": "torch has no NCCL"}]
    return [_formed_and_aborted(kind, device) for _ in range(2)]


def _formed_and_aborted(
    kind: type[NcclBackend] | type[GlooBackend], device: torch.device
) -> dict[str, Any]:
    buffer = torch.ones(COLLECTIVE_BYTES // 4, device=device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    times = [time.perf_counter()]
    member = MeshMember(0, 1, device, "127.0.0.1", timeout_s=60.0)
    side = kind(_Alone(), member, lambda made: None)  # type: ignore[arg-type]
    times.append(time.perf_counter())
    handle = side.all_reduce(buffer)
    while not handle.poll(0.01) and time.perf_counter() < times[-1] + 60:
        pass
    handle.result()
    right = bool((buffer == 1).all())
    times.append(time.perf_counter())
    taken = free - torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    side.sever()
    for thread in threading.enumerate():
        if thread.name == "mesh-abort":
            thread.join(60.0)
    times.append(time.perf_counter())
    formed, used, aborted = (after - before for before, after in itertools.pairwise(times))
    return {
        "over": "NCCL" if kind is NcclBackend else "gloo",
        "formed, s": formed,
        "reduced, s": used,
        "aborted, s": aborted,
        "memory, MiB": taken / (1 << 20),
        "ok": right,
    }
