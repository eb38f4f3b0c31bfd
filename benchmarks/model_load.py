"""Host memory while the ranks of a replica load a model: how much above the shards that they keep.

    python -m benchmarks.model_load [--layers N] [--hidden N] [--ranks 1,2,4] [--out FILE]

A model is made on disk in bfloat16 and loaded in float32 by all ranks of a replica at once, on the
CPU. Memory is what the processes have allocated (anonymous pages); files that the kernel has mapped
are not counted, because it can drop them. The peak is that of the sum over the ranks, sampled every
5 ms, above what they had before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import measured_replica
from benchmarks.measured_replica import Peak, make_model
from benchmarks.runs import child, machine, write
from policy_worker.rows.replica import Replica


def load(replica: Replica, path: str, whole: bool) -> dict[str, Any]:
    """Bytes of the shards of all ranks, and the sum of their peaks while they load."""
    from paceline.config.schema import Config
    from policy_worker.model.policy_model import load_part
    from policy_worker.model.train_state import local_tensor
    from policy_worker.objectives.objective import Part
    from policy_worker.ranks.sharding import load_sharded, shard_model

    settings = {"model": {"path": path, "device": "cpu"}, "data": {"path": "d"}}
    config, device = Config.model_validate(settings), torch.device("cpu")
    torch.zeros(1)
    replica.agree(True)
    begun = time.monotonic()
    with Peak() as peak:
        if whole and replica.mesh is not None:  # as it was before slices were read
            model = shard_model(load_part(Part("policy"), config, device), replica.mesh)
        else:
            model = load_sharded(Part("policy"), config, replica, device, trainable=True)
        replica.agree(True)
    seconds = time.monotonic() - begun
    kept = sum(local_tensor(p).nbytes for p in model.parameters())
    everyone = replica.gather([kept, peak.above])
    shards, peaks = (sum(values) for values in zip(*everyone, strict=True))
    return {
        "ranks": replica.size,
        "how": "whole" if whole or replica.size == 1 else "slices",
        "shards_mib": shards / 2**20,
        "peak_mib": peaks / 2**20,
        "peak_over_shards": peaks / shards,
        "seconds": seconds,
    }


def measure(arguments: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.hidden, arguments.layers)
        for count in (int(part) for part in arguments.ranks.split(",")):
            for how in ([], ["--whole"]) if count > 1 else ([],):
                rows.append(child("benchmarks.model_load", "--one", count, "--path", folder, *how))
                print(rows[-1], flush=True)
    write("model_load", {"machine": machine(), "loads": rows}, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--out", type=Path)
    measured_replica.add_arguments(parser)
    parser.add_argument("--path", default="", help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    measured_replica.take_part(
        arguments, "benchmarks.model_load", load, [arguments.path, arguments.whole]
    )
    measure(arguments)


if __name__ == "__main__":
    main()
