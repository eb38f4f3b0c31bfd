"""Publishing of a replica: each of its ranks keeps a share of the weights and is a source of its
links.

commit ─► publish ─► slices ─► share_exchange ─► share of each rank ─► its link threads ─► receivers
   └──── on a stream of its own ────┘                ▲
directive ─► rank 0 ─► link_notices ─────────────────┘ the same links on every rank
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.config.schema import Config
from paceline.ids import Version
from paceline.v1 import worker_pb2
from paceline.weights.weight_snapshot import BUCKET_BYTES, WireDtype
from paceline.weights.wire.weight_manifest import Manifest
from paceline.weights.wire.weight_share import WeightShare
from policy_worker.model.device_copies import DeviceCopies
from policy_worker.model.train_state import TrainState
from policy_worker.objectives.part import POLICY
from policy_worker.ranks.link_notices import LinkNotices
from policy_worker.ranks.rank_group import RankGroup
from policy_worker.ranks.share_exchange import Extent, ShareExchange
from policy_worker.ranks.sliced_weights import local_slice
from policy_worker.weight_publisher import WeightPublisher


@dataclass(frozen=True, slots=True)
class PublishingPlace:
    """Where a replica publishes."""

    url: str
    """Redis of the rendezvous."""
    run_id: str
    host: str
    """Address of rank 0 for receivers, and of ranks that have none of their own."""
    bucket_bytes: int = BUCKET_BYTES


class ReplicaPublisher:
    """One rank's part in it. Made, and called to publish, on all ranks in the same order."""

    def __init__(
        self,
        state: TrainState,
        replica: RankGroup,
        device: torch.device,
        place: PublishingPlace,
        on_link_error: Callable[[int, str], None] = lambda epoch, why: None,
    ) -> None:
        """``on_link_error``: as for LinkEnd. Collective."""
        config = state.config
        self._state, self._replica = state, replica
        self._notices: LinkNotices | None = None
        self._copies = DeviceCopies(device)
        self.links = WeightPublisher(
            url=place.url,
            run_id=place.run_id,
            device=device,
            wire=wire_dtype(state),
            deltas=config.rollout.weight_deltas,
            on_host=config.train.offload_publishing,
            bucket_bytes=place.bucket_bytes,
            share=WeightShare(replica.rank, replica.size),
            on_link_error=on_link_error,
            host=replica.host or place.host,
            through_host=config.weights_through_host,
        )
        if replica.store is not None:
            self._notices = LinkNotices(replica.store, replica.rank, replica.size)
            self._notices.start(self.links.set_links)

    def set_links(self, links: Sequence[worker_pb2.WeightsLink]) -> None:
        """Rank 0, any thread: all ranks converge to these links. Does not block."""
        self.links.set_links(links)
        if self._notices is not None:
            self._notices.tell(links)

    def publish(self, version: Version) -> float:
        """Collective: makes the present weights the newest version; returns the seconds that it
        took.

        On a GPU the copies go on beside training: call ``before_change`` before the weights are
        changed. With several ranks their exchange is on the communicator of FSDP2's gathers, so the
        next forward's first gather comes after it.
        """
        with self._copies.queued():
            return self._publish(version)

    def before_change(self) -> None:
        """What is queued on the device from now on may change the weights: it comes after the
        copies under way."""
        self._copies.before_change()

    def _publish(self, version: Version) -> float:
        if self._replica.size == 1:
            return self.links.publish(version, self._weights(), self._layout)
        slices = [local_slice(tensor)[0].reshape(-1) for _, tensor in self._weights()]
        exchange = self._exchange

        def fill(flat: Tensor) -> None:
            exchange.fill(flat, slices, self._replica.all_to_all)

        return self.links.publish_share(version, exchange.manifest, fill)

    def forget(self) -> None:
        """Collective: see WeightPublisher.forget()."""
        self.links.forget()

    def free(self) -> None:
        """Collective: see WeightPublisher.free()."""
        self.links.free()

    def close(self) -> None:
        if self._notices is not None:
            self._notices.close()
        self.links.close()

    def _weights(self) -> list[tuple[str, Tensor]]:
        """As this rank stores them; none if there is no policy."""
        return list(self._state.weights_of(POLICY)) if POLICY in self._state.parts else []

    @cached_property
    def _layout(self) -> list[tuple[str, Tensor]]:
        """Names, shapes and types of the weights, as tensors without data."""
        return [
            (name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            for name, tensor in self._weights()
        ]

    @cached_property
    def _exchange(self) -> ShareExchange:
        """Collective when it is first asked for."""
        manifest = Manifest.of(
            self._layout, bucket_bytes=self.links.bucket_bytes, dtype=self.links.wire.of
        )
        extents = self._replica.gather([_extent(name, t) for name, t in self._weights()])
        return ShareExchange(manifest, self.links.share, extents)


def _extent(name: str, tensor: Tensor) -> Extent:
    local, offset = local_slice(tensor)
    if not isinstance(tensor, DTensor):
        return 0, tensor.numel()
    if local.shape[1:] != tensor.shape[1:] or any(offset[1:]):
        raise ValueError(f"{name} is sliced along another dimension than the first")
    row = tensor.shape[1:].numel()
    return (offset[0] * row, local.numel()) if local.numel() else (0, 0)


def wire_dtype(state: TrainState) -> WireDtype:
    """The engine's type. Some models keep a few tensors in float32 beside bfloat16 (a router's
    bias)."""
    config: Config = state.config
    policy = state.parts.get(POLICY)
    dtype = config.model.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
    if policy is None or dtype == "float32":
        return WireDtype()
    kept = getattr(policy, "_keep_in_fp32_modules_strict", None) or ()
    pattern = re.compile(
        "|".join(rf"(?:^|\.)(?:{module})(?:$|\.)" for module in sorted(kept)) or "$^"
    )
    names = [name for name, _ in state.weights_of(POLICY) if pattern.search(name)]
    return WireDtype(getattr(torch, dtype), frozenset(names))
