"""Check of a GPU machine, offline, with torch, transformers and a few small packages.

    python -m benchmarks.gpu_check [--out FILE] [--without-fleet]

First it says what this machine lacks. Then: log-probs and gradients against the CPU; packed rows
of each architecture; a NCCL communicator of one rank; generation and weight swaps of the engines;
the trainer on Qwen3 shapes of 0.6B to 4B, with rows of 8k to 32k tokens whose lengths change, each
setting alone, and its peak memory against the plan; adapters (LoRA) on 4B and 8B; publishing and
checkpoints beside training; turns of a trainer and an engine at one device; and a short run in
which a rollout worker and a policy replica are killed. Parts that need missing packages are left
out, and a part that fails stops no other. Without a GPU everything runs on the CPU with a toy
model. Exit status 1 if a part fails.
"""

import argparse
import gc
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    import torch

    from benchmarks.gpu_check.beside import beside_training
    from benchmarks.gpu_check.fleet import fleet, missing
    from benchmarks.gpu_check.models import QWEN3_0_6B, QWEN3_1_7B, QWEN3_4B, QWEN3_8B, TOY
    from benchmarks.gpu_check.parity import architectures, parity
    from benchmarks.gpu_check.serving import communicator, engines
    from benchmarks.gpu_check.trainer_speed import (
        OPTIONS,
        publication,
        trainer_speed,
        with_adapters,
    )
    from benchmarks.gpu_check.turns import turns
    from paceline.process.compute_device import c_compiler, give_back_freed, pick_device
except ModuleNotFoundError as error:
    sys.exit(
        f"the GPU check needs the package {error.name}: pip install -c constraints.txt torch "
        "transformers pydantic protobuf redis psutil tomli-w (small wheels, apart from torch)"
    )

SIZES = {QWEN3_0_6B: (8192, 16_384, 32_768), QWEN3_1_7B: (8192, 16_384), QWEN3_4B: (8192,)}
"""Tokens of a row, by model."""
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check.json"))
    parser.add_argument("--without-fleet", action="store_true", help="no run with faults")
    parser.add_argument("--seconds", type=float, default=300.0, help="no part begins later")
    args = parser.parse_args()
    found = check(with_fleet=not args.without_fleet, seconds=args.seconds)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"\nwritten to {args.out}")
    if found["failed"]:
        sys.exit(f"failed: {', '.join(found['failed'])}")


def check(*, with_fleet: bool, seconds: float) -> dict[str, Any]:
    """Runs all parts, one after the other; a part that fails is noted, and the next one runs."""
    gpus, device = torch.cuda.device_count(), pick_device("auto")
    name = torch.cuda.get_device_name(device) if gpus else "no GPU: a toy model on the CPU"
    lacking = list(lacks(gpus))
    print("\n".join([name, *(f"lacks {thing}" for thing in lacking)]))
    found: dict[str, Any] = {"machine": machine(device, gpus), "device": name, "gpus": gpus}
    found |= {"lacks": lacking, "failed": []}
    sizes = SIZES if gpus else {TOY: (256, 512)}
    small, lengths = next(iter(sizes.items()))
    parts: dict[str, Callable[[], Rows]] = {
        "parity": lambda: parity(device),
        "architectures": lambda: architectures(device),
        "communicator": lambda: communicator(device),
        "engines": lambda: engines(device, small, 256 if gpus else 24),
    }
    for shape, rows in sizes.items():
        parts[f"trainer, {shape.name}"] = partial(trainer_speed, device, shape, rows)
    parts["publication"] = lambda: [publication(device, small)]
    for shape, rows in ({QWEN3_4B: (8192,), QWEN3_8B: (8192,)} if gpus else sizes).items():
        parts[f"LoRA, {shape.name}"] = partial(with_adapters, device, shape, rows[:1])
    parts["turns"] = lambda: turns(device, small)
    parts["beside training"] = partial(beside_training, device, small, lengths[0])
    if with_fleet and not missing():
        # One GPU cannot hold two ranks of one NCCL communicator.
        ranks = (1, 2) if gpus > 1 else (1,)
        parts["fleet"] = lambda: [fleet(device, small, count) for count in ranks]
    for option in OPTIONS:  # last: what the time limit cuts off says the least
        parts[f"trainer, {option}"] = partial(trainer_speed, device, small, lengths[:1], option)
    start = time.perf_counter()
    for part, run in parts.items():
        begun = time.perf_counter()
        if begun - start > seconds:
            found[part] = [{"left out": f"{seconds:.0f} s are over"}]
            continue
        try:
            found[part] = run()
        except Exception as error:  # whatever a machine does: the other parts say more about it
            found[part] = [{"error": f"{type(error).__name__}: {error}"[:2000], "ok": False}]
        gc.collect()
        give_back_freed(device)  # processes of the fleet compute there too
        print(f"\n{part}, {time.perf_counter() - begun:.0f} s")
        for row in found[part]:
            print("  " + json.dumps(row))
        if not all(row.get("ok", True) for row in found[part]):
            found["failed"].append(part)
    return found


def machine(device: torch.device, gpus: int) -> dict[str, Any]:
    """Description as that of benchmarks.runs, with the GPU as the processor and without the load:
    that of the host says nothing of a GPU."""
    found: dict[str, Any] = {"cpu": platform.processor(), "cores": os.cpu_count()}
    if gpus:
        gpu = torch.cuda.get_device_properties(device)
        found["cpu"] = f"{'One' if gpus == 1 else gpus} {gpu.name}"
        found["gpu_memory_gib"] = round(gpu.total_memory / (1 << 30), 1)
    found |= {"torch": torch.__version__, "transformers": version("transformers")}
    return found | {"when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}


def lacks(gpus: int) -> Iterator[str]:
    """What the check cannot use here, and so says nothing about."""
    if gpus < 2:
        yield "a second GPU: nothing between GPUs" if gpus else "a GPU: no speed of one"
    if not c_compiler():
        yield "a C compiler: Triton compiles nothing for the trainer"
    if not importlib.util.find_spec("vllm"):
        yield "vLLM: the transformers engine alone"
    if packages := ", ".join(missing()):
        yield f"{packages}: no publishing beside training, no run"


if __name__ == "__main__":
    main()
