"""Turns of a trainer and an engine at one device: seconds of a switch by part, what it frees, and
whether all bits come back."""

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_check.models import Shape, make_gradients, make_model, run_config
from paceline.process.parked_memory import ParkedMemory

TURNS = 3
"""The first one has the host memory page-locked; the others use it again."""


def turns(device: torch.device, shape: Shape) -> list[dict[str, Any]]:
    """A trainer's weights and moments (12 bytes a parameter) go to the host and come back, as
    Trainer.park() and unpark() move them; then an engine's weights, in bfloat16, are dropped and
    filled from the host. On a CPU the copies are made as if it were a GPU."""
    rows = _trainer(device, shape)
    _give_back(device)
    return [*rows, *_engine(device, shape)]


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


def _engine(device: torch.device, shape: Shape) -> list[dict[str, Any]]:
    model = make_model(shape, device).to(torch.bfloat16).requires_grad_(False)
    weights = _owned(list(model.parameters()))
    host = [w.cpu().pin_memory() if w.is_cuda else w.clone() for w in weights]
    parked, rows = ParkedMemory(device), []
    for turn in range(TURNS):
        held, begun = _held(device), time.perf_counter()
        parked.park(weights)
        asleep, left = time.perf_counter(), _held(device)
        parked.unpark()
        awake = time.perf_counter()
        torch._foreach_copy_(weights, host, non_blocking=True)
        _wait(device)
        end = time.perf_counter()
        same = all(torch.equal(a, b.cpu()) for a, b in zip(host, weights, strict=True))
        rows.append(
            {
                "model": shape.name,
                "role": "engine",
                "turn": turn,
                "sleep, s": asleep - begun,
                "wake, s": awake - asleep,
                "filled from the host, s": end - awake,
                "GB freed": (held - left) / 1e9,
                "ok": same,
            }
        )
    return rows


def _owned(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, in memory of their own: that of a file's mapping cannot be given back."""
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return tensors


def _held(device: torch.device) -> int:
    """Bytes of the device that this process has taken; 0 on a CPU."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _give_back(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
