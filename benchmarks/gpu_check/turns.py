"""Turns of a trainer and an engine at one device: seconds of a switch by part, what it frees, and
whether all bits come back."""

import asyncio
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_check.models import Shape, make_gradients, make_model, run_config
from benchmarks.gpu_check.serving import WITHOUT_VLLM, engine_config, engines_here, write_model
from paceline.config.schema import Config
from paceline.process.compute_device import give_back_freed
from paceline.process.parked_memory import ParkedMemory
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import Engine, Request, SamplingParams
from rollout_worker.engine.choice import make_engine

TURNS = 3
"""The first one has the host memory page-locked; the others use it again."""


def turns(device: torch.device, shape: Shape) -> list[dict[str, Any]]:
    """A trainer's weights and moments (12 bytes a parameter) go to the host and come back, as
    Trainer.park() and unpark() move them; on a CPU the copies are made as if it were a GPU. Then
    each engine gives up weights and cache, takes their memory again, and is filled from the
    host."""
    rows, ways = _trainer(device, shape), engines_here(device)
    trainer = rows[-1]
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-check-") as name:
        path = write_model(shape, device, Path(name))
        for settings in ways.values():
            gc.collect()
            give_back_freed(device)  # an engine waits until nobody else computes there
            config = engine_config(path, device, settings, sharing="turns", rollout=1)
            rows += asyncio.run(_engine(device, shape, config))
            rows.append(_switch(trainer, rows[-1]))
    return rows if "vllm" in ways else [*rows, WITHOUT_VLLM]


def _trainer(device: torch.device, shape: Shape) -> list[dict[str, Any]]:
    model = make_model(shape, device)
    gradients = make_gradients(model, run_config("bfloat16", 512), device)
    moments = (m for state in gradients.state.optimizer.state.values() for m in state.values())
    copies = [*gradients.forwards.copies.copy_of.values()]
    parked, kept = ParkedMemory(device, moves=True), _owned([*gradients.parameters, *moments])
    before = [tensor.detach().cpu().clone() for tensor in kept]
    rows = []
    for turn in range(TURNS):
        held = _held(device)
        begun = time.perf_counter()
        parked.copy(kept)
        copied = time.perf_counter()
        parked.park(copies)
        freed, left = time.perf_counter(), _held(device)
        parked.unpark()
        end = time.perf_counter()
        same = all(torch.equal(a, b.cpu()) for a, b in zip(before, kept, strict=True))
        rows.append(
            {
                "model": shape.name,
                "role": "trainer",
                "turn": turn,
                "to the host, s": copied - begun,
                "given back, s": freed - copied,
                "taken again, s": end - freed,
                "GB freed": (held - left) / 1e9,
                "GB left": left / 1e9,
                "ok": same,
            }
        )
    return rows


async def _engine(device: torch.device, shape: Shape, config: Config) -> list[dict[str, Any]]:
    """What a rollout worker does with its engine, which may be in other processes."""
    model = make_model(shape, torch.device("cpu")).to(torch.bfloat16)
    weights, rows = dict(model.named_parameters()), []
    engine = make_engine(config, PromptTokenizer(config))
    await engine.start()
    try:
        await engine.load_weights(0, weights)
        for _ in range(2):  # the first captures graphs
            before = await _greedy(engine)
        for turn in range(TURNS):
            held, begun = _taken(device), time.perf_counter()
            await engine.park()
            asleep, left = time.perf_counter(), _taken(device)
            await engine.unpark()
            awake = time.perf_counter()
            await engine.load_weights(turn + 1, weights)
            end = time.perf_counter()
            rows.append(
                {
                    "model": shape.name,
                    "role": config.rollout.engine,
                    "turn": turn,
                    "sleep, s": asleep - begun,
                    "wake, s": awake - asleep,
                    "filled from the host, s": end - awake,
                    "GB freed": (held - left) / 1e9,
                    "ok": await _greedy(engine) == before,
                }
            )
    finally:
        await engine.close()
    return rows


async def _greedy(engine: Engine) -> list[int]:
    request = Request(
        f"{time.perf_counter()}", np.arange(3, 19, dtype=np.int32), SamplingParams(16, greedy=True)
    )
    (completion,) = await engine.generate(request)
    return [*completion.tokens]


def _switch(trainer: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Seconds in which neither computes, after the first turn."""
    return {
        "model": trainer["model"],
        "role": f"switch, {engine['role']}",
        "to training, s": engine["sleep, s"] + trainer["taken again, s"],
        "to generation, s": trainer["to the host, s"]
        + trainer["given back, s"]
        + engine["wake, s"]
        + engine["filled from the host, s"],
    }


def _owned(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, in memory of their own: that of a file's mapping cannot be given back."""
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return tensors


def _held(device: torch.device) -> int:
    """Bytes of the device that this process has taken; 0 on a CPU."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


def _taken(device: torch.device) -> int:
    """Bytes of the device that all processes have taken; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)
