"""Weights to 1, 2, 4 and 8 receivers: whole, in the engine's type, and as what a step changed.

    python -m benchmarks.weights [--elements 32] [--out FILE]

Real receiver processes with one thread each, real Redis, loopback. The weights are normal with a
deviation of 0.02 and are trained by AdamW at a learning rate of 1e-6 on random gradients, which
moves every element by about the learning rate: a dense step, not one that is sparse by
construction. Each receiver checks every bucket's checksum. Loopback is faster than any network, so
times show what encoding costs, and bytes what a network would be spared.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import runs
from paceline.v1 import worker_pb2
from paceline.weights.weight_snapshot import WireDtype
from policy_worker.publisher import WeightPublisher
from testbed.redis.redis_process import throwaway_redis
from testbed.workers import weight_link_peer

CPU = torch.device("cpu")
RECEIVERS = (1, 2, 4, 8)
STEPS = 6
LEARNING_RATE = 1e-6
DEVIATION = 0.02
WIRES = {
    "float32": (None, False),
    "bfloat16": (torch.bfloat16, False),
    "deltas": (torch.bfloat16, True),
}


def main() -> None:
    parser = runs.options("weights", __doc__, "weights")
    parser.add_argument("--elements", type=int, default=32, help="millions of weights")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(prefix="paceline-weights-") as name,
        throwaway_redis(Path(name)) as url,
    ):
        rows = [
            transfers(url, args.elements, wire, receivers)
            for receivers in RECEIVERS
            for wire in WIRES
        ]
    result = {"machine": runs.machine(), "elements": args.elements * 1_000_000, "rows": rows}
    runs.write(args.out, result)


def transfers(url: str, millions: int, wire: str, receivers: int) -> dict[str, Any]:
    dtype, deltas = WIRES[wire]
    shares = []
    with Links(
        url, f"{wire}-{receivers}", receivers, wire=WireDtype(dtype), deltas=deltas
    ) as links:
        for version, tensors in enumerate(trained(millions)):
            links.publish(version, tensors)
            shares.append(links.publisher.delta_share())
    # The first transfer has no base, and pays for fresh memory at both ends.
    return {
        "receivers": receivers,
        "wire": wire,
        "bytes_share": statistics.fmean(shares[1:]) * (1.0 if dtype is None else 0.5),
        "share_of_bf16": statistics.fmean(shares[1:]) if deltas else None,
        "worst_share_of_bf16": max(shares[1:]) if deltas else None,
        "transfer_ms": statistics.median(links.transfer_s[1:]) * 1e3,
    }


class Links:
    """A publisher in this process, and receivers that are processes; times of their transfers."""

    def __init__(
        self,
        url: str,
        run_id: str,
        receivers: int,
        device: torch.device = CPU,
        **publisher: Any,
    ) -> None:
        self.publisher = Counting(
            url=url,
            run_id=run_id,
            device=device,
            on_link_error=lambda epoch, detail: None,
            **publisher,
        )
        epochs = range(receivers)
        self._ends = [weight_link_peer.start("receiver", url, run_id, epoch) for epoch in epochs]
        self.publisher.set_links([worker_pb2.WeightsLink(epoch=epoch) for epoch in epochs])
        self.publish_s: list[float] = []
        self.transfer_s: list[float] = []

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Returns when the last receiver has the version."""
        self.publish_s.append(self.publisher.publish(version, tensors.items()))
        seconds = [weight_link_peer.next_line(end)["seconds"] for end in self._ends]
        self.transfer_s.append(max(seconds))

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *error: object) -> None:
        for end in self._ends:
            end.kill()
            end.wait()
        self.publisher.close()


def trained(millions: int) -> Iterator[dict[str, Tensor]]:
    """The weights after each of STEPS optimizer steps: float32, about the number of tensors of a
    small model."""
    generator = torch.Generator().manual_seed(0)
    size = millions * 1_000_000 // 100
    tensors = {f"t{i}": torch.randn(size, generator=generator) * DEVIATION for i in range(100)}
    optimizer = torch.optim.AdamW([t.requires_grad_() for t in tensors.values()], lr=LEARNING_RATE)
    for _ in range(STEPS):
        yield tensors
        for tensor in tensors.values():
            tensor.grad = torch.randn(size, generator=generator)
        optimizer.step()


class Counting(WeightPublisher):
    """A publisher whose newest snapshot can be looked at."""

    def delta_share(self) -> float:
        """Bytes that the newest version takes on a link, of all its bytes."""
        newest = self._newest
        assert newest is not None
        base = newest.base
        if base is None:
            return 1.0
        sizes = [
            newest.bucket(i).numel() if (delta := newest.delta(i, base)) is None else delta.numel()
            for i in range(newest.manifest.buckets)
        ]
        share: float = sum(sizes) / newest.manifest.total_bytes
        return share


if __name__ == "__main__":
    main()
