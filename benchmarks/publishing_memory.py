"""Host memory of the ranks of a replica while they publish: how much above the model that they
hold.

    python -m benchmarks.publishing_memory [--layers N] [--hidden N] [--ranks 1,2,4] [--out FILE]

A model of about 1 GiB in bfloat16 is loaded in float32 by the ranks of a replica, on the CPU, and
published three times with nobody to send to. Memory is what a process has allocated (anonymous
pages), sampled every 5 ms, above what it had before the first publication. "Whole on rank 0"
gathers whole weights in float32 on all ranks and keeps a copy of all of them on rank 0, as before
each rank kept its share.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import measured_replica
from benchmarks.measured_replica import Peak, make_model
from benchmarks.runs import child, machine, write
from policy_worker.rows.replica import Replica

VERSIONS = 3
WAYS = ("share", "share_deltas", "whole")
"""Shares without and with the version before, on which deltas build; and all on rank 0, without it.
"""


def publish(replica: Replica, path: str, how: str) -> dict[str, Any]:
    """By rank: bytes of its slices and of its share, and the peak of the first publication and of
    all."""
    from paceline.config.schema import Config
    from paceline.weights.weight_snapshot import BUCKET_BYTES
    from policy_worker.model.train_state import TrainState, local_tensor
    from policy_worker.objectives.objective import POLICY, Part
    from policy_worker.publishing.publisher import PublishingPlace, ReplicaPublisher
    from policy_worker.ranks.sharding import load_sharded

    device = torch.device("cpu")
    config = Config.model_validate(
        {
            "model": {"path": path, "device": "cpu"},
            "data": {"path": "d"},
            "rollout": {"dtype": "bfloat16", "weight_deltas": how == "share_deltas"},
        }
    )
    model = load_sharded(Part(POLICY), config, replica, device, trainable=True)
    state = TrainState({POLICY: model}, torch.optim.SGD(model.parameters()), 0, 0, config)  # type: ignore[arg-type]
    publisher = ReplicaPublisher(
        state, replica, device, PublishingPlace("redis://nowhere", "r", "127.0.0.1")
    )
    one = publisher.publish if how != "whole" else _on_rank_0(state, replica, publisher)
    # gloo allocates when it first connects.
    warm = torch.zeros(replica.size, dtype=torch.uint8)
    if replica.size > 1:
        replica.all_to_all(warm, warm.clone(), [1] * replica.size, [1] * replica.size)
    replica.agree(True)
    peaks, seconds = [], []
    with Peak() as peak:
        for version in range(VERSIONS):
            seconds.append(one(version))  # type: ignore[arg-type]
            replica.agree(True)
            peaks.append(peak.so_far)
    newest = publisher._newest
    slices = sum(local_tensor(p).nbytes for p in model.parameters())
    own = [slices, 0 if newest is None else newest.flat.numel(), peaks[0], peaks[-1]]
    everyone = replica.gather([*own, max(seconds)])
    publisher.close()
    return {
        "ranks": replica.size,
        "how": how,
        "bucket_mib": BUCKET_BYTES / 2**20,
        "by_rank": [
            {
                "slices_mib": slices / 2**20,
                "share_mib": share / 2**20,
                "first_peak_mib": first / 2**20,
                "peak_mib": largest / 2**20,
            }
            for slices, share, first, largest, _ in everyone
        ],
        "seconds": max(row[-1] for row in everyone),
    }


def _on_rank_0(state: Any, replica: Replica, publisher: Any) -> Callable[[int], float]:
    from policy_worker.objectives.objective import POLICY
    from policy_worker.publishing.publisher import WeightPublisher

    layout = [
        (name, torch.empty(t.shape, dtype=t.dtype, device="meta"))
        for name, t in state.weights_of(POLICY)
    ]
    whole = WeightPublisher(
        url="redis://nowhere",
        run_id="r",
        device=torch.device("cpu"),
        wire=publisher.wire,
        deltas=False,
        on_link_error=lambda epoch, why: None,
    )

    def publish_whole(version: int) -> float:
        gathered = (
            (name, t.full_tensor() if replica.size > 1 else t)
            for name, t in state.weights_of(POLICY)
        )
        if not replica.leads:
            for _ in gathered:
                pass
            return 0.0
        seconds = whole.publish(version, gathered, layout)
        publisher._newest = whole._newest
        return seconds

    return publish_whole


def measure(arguments: argparse.Namespace) -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.hidden, arguments.layers)
        for count in (int(part) for part in arguments.ranks.split(",")):
            for how in WAYS:
                own = ["--one", count, "--path", folder, "--how", how]
                rows.append(child("benchmarks.publishing_memory", *own))
                print(rows[-1], flush=True)
    write("publishing_memory", {"machine": machine(), "rows": rows}, arguments.out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=42)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--out", type=Path)
    measured_replica.add_arguments(parser)
    parser.add_argument("--path", default="", help=argparse.SUPPRESS)
    parser.add_argument("--how", choices=WAYS, default="share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured_replica.take_part(
        arguments, "benchmarks.publishing_memory", publish, [arguments.path, arguments.how]
    )
    measure(arguments)


if __name__ == "__main__":
    main()
