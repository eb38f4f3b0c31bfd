"""Check of a GPU machine, offline, with torch, transformers and a few small packages.

    python -m benchmarks.gpu_check [--out FILE] [--without-fleet]

Log-probs and gradients against the CPU; the trainer on Qwen3 shapes of 0.6B to 4B, with rows of 8k
to 32k tokens whose lengths change, each setting alone, and its peak memory against the plan;
publication of weights; turns of a trainer and an engine at one device; and a short run in which a
rollout worker and a policy replica are killed. The run is left out if packages that it needs are
missing. Without a GPU everything runs on the CPU with a toy model. Exit status 1 if a part fails.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

try:
    import torch

    from benchmarks.gpu_check.fleet import fleet, missing
    from benchmarks.gpu_check.models import QWEN3_0_6B, QWEN3_1_7B, QWEN3_4B, TOY
    from benchmarks.gpu_check.parity import parity
    from benchmarks.gpu_check.trainer_speed import OPTIONS, publication, trainer_speed
    from benchmarks.gpu_check.turns import turns
    from paceline.process.compute_device import pick_device
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
    parser.add_argument("--seconds", type=float, default=600.0, help="no part begins later")
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
    print(name)
    found: dict[str, Any] = {"device": name, "gpus": gpus, "torch": torch.__version__, "failed": []}
    sizes = SIZES if gpus else {TOY: (256, 512)}
    small, lengths = next(iter(sizes.items()))
    parts: dict[str, Callable[[], Rows]] = {
        "parity": lambda: parity(device),
    }
    for shape, rows in sizes.items():
        parts[f"trainer, {shape.name}"] = partial(trainer_speed, device, shape, rows)
    for option in OPTIONS:
        parts[f"trainer, {option}"] = partial(trainer_speed, device, small, lengths[:1], option)
    parts["publication"] = lambda: [publication(device, small)]
    parts["turns"] = lambda: turns(device, small)
    if not with_fleet:
        found["fleet_left_out"] = "--without-fleet"
    elif lacking := missing():
        found["fleet_left_out"] = f"not installed: {', '.join(lacking)}"
    else:
        # One GPU cannot hold two ranks of one NCCL communicator.
        ranks = (1, 2) if gpus > 1 else (1,)
        parts["fleet"] = lambda: [fleet(device.type, count) for count in ranks]
    if why := found.get("fleet_left_out"):
        print(f"no run of a fleet: {why}")
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
        print(f"\n{part}, {time.perf_counter() - begun:.0f} s")
        for row in found[part]:
            print("  " + json.dumps(row))
        if not all(row.get("ok", True) for row in found[part]):
            found["failed"].append(part)
    return found


if __name__ == "__main__":
    main()
