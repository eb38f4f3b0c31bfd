"""Check of a GPU machine, offline, with torch, transformers and a few small packages.

    python -m benchmarks.gpu_check [--out FILE] [--without-fleet]

Log-probs and gradients against the CPU, the trainer on Qwen3 shapes of 0.6B and 1.7B with rows of
8k tokens, its peak memory against `paceline plan memory`, publication of weights, and a short run
in which a rollout worker and a policy replica are killed. The run needs the other packages of
Paceline, and is left out, with their names, if they are missing. Without a GPU everything runs on
the CPU with a toy model. Exit status 1 if a part fails.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import torch

    from benchmarks.gpu_check.fleet import fleet, missing
    from benchmarks.gpu_check.models import QWEN3_0_6B, QWEN3_1_7B, TOY
    from benchmarks.gpu_check.parity import parity
    from benchmarks.gpu_check.trainer_speed import OPTIONS, publication, trainer_speed
except ModuleNotFoundError as error:
    sys.exit(
        f"the GPU check needs the package {error.name}: pip install -c constraints.txt torch "
        "transformers pydantic protobuf redis psutil tomli-w (small wheels, apart from torch)"
    )

ROW_TOKENS = 8192
TOY_ROW_TOKENS = 256
Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check.json"))
    parser.add_argument("--without-fleet", action="store_true", help="no run with faults")
    args = parser.parse_args()
    found = check(with_fleet=not args.without_fleet)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n")
    print(f"\nwritten to {args.out}")
    if found["failed"]:
        sys.exit(f"failed: {', '.join(found['failed'])}")


def check(*, with_fleet: bool) -> dict[str, Any]:
    """Runs all parts, one after the other; a part that fails is noted, and the next one runs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", 0) if gpus else torch.device("cpu")
    name = torch.cuda.get_device_name(device) if gpus else "no GPU: a toy model on the CPU"
    print(name)
    found: dict[str, Any] = {"device": name, "gpus": gpus, "torch": torch.__version__, "failed": []}
    shapes = (
        [(QWEN3_0_6B, ROW_TOKENS), (QWEN3_1_7B, ROW_TOKENS)] if gpus else [(TOY, TOY_ROW_TOKENS)]
    )
    parts: dict[str, Callable[[], Rows]] = {
        "parity": lambda: parity(device),
        "trainer": lambda: [trainer_speed(device, shape, row) for shape, row in shapes],
        "trainer's options": lambda: [
            trainer_speed(device, *shapes[0], option)
            for option in OPTIONS
            # Compilation for a CPU takes longer than all else.
            if gpus or option != "compiled blocks"
        ],
        "publication": lambda: [publication(device, shape) for shape, _ in shapes[:1]],
    }
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
    for part, run in parts.items():
        begun = time.perf_counter()
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
