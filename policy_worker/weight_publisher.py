"""Weight publisher: a snapshot on the training path, encoding and sending in the background.

training thread ── publish(v) ──► newest snapshot ──► link thread ──► receiver
                                         └──────────► link thread ──► receiver
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from paceline.weights.sending_end import SendingEnd
from paceline.weights.weight_link import WeightLink
from paceline.weights.weight_snapshot import BUCKET_BYTES, SnapshotPool, WeightSnapshot, WireDtype


class WeightPublisher(SendingEnd):
    """The trainer's end of any number of links."""

    thread_name = "publish"

    def __init__(
        self,
        *,
        wire: WireDtype | None = None,
        deltas: bool = True,
        on_host: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        **ends: Any,
    ) -> None:
        """``wire``: the type in which weights travel; default: the tensors' own. ``deltas``: keep the version before,
        so that the newest may travel as what changed. ``on_host``: keep the snapshots in host memory. ``bucket_bytes``: what
        is checked, kept and handed on at once. Other arguments as for LinkEnd."""
        self._bucket_bytes = bucket_bytes
        self._deltas = deltas
        self._on_host = on_host
        self._wire = wire or WireDtype()
        self._pool = SnapshotPool()
        self._newest: WeightSnapshot | None = None
        super().__init__(**ends)

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Tensor]],
        layout: Sequence[tuple[str, Tensor]] | None = None,
    ) -> float:
        """Makes these weights the newest version; returns the seconds that the caller spent on it.

        Copies the tensors once and returns; on a CUDA device even the copy runs in the background,
        in the order of the current stream. A version that is not newer is ignored. ``layout``: see WeightSnapshot.take().
        """
        started = time.perf_counter()
        if version > self.version:
            base = self._newest
            if base is not None:
                # One base is kept: a receiver that has an earlier version gets whole buckets.
                base.forget_base()
            snapshot = WeightSnapshot.take(
                version,
                named_tensors,
                self._pool,
                bucket_bytes=self._bucket_bytes,
                wire=self._wire,
                layout=layout,
                on_host=self._on_host,
            )
            if self._deltas:
                snapshot.follow(base)
            with self._changed:
                self._newest = snapshot
                self._changed.notify_all()
        return time.perf_counter() - started

    def forget(self) -> None:
        """The published version was never committed: the next one counts as newer, whatever its number."""
        with self._changed:
            self._newest = None

    def free(self) -> None:
        """Keeps no memory of snapshots, except of one that is being sent."""
        with self._changed:
            self._newest = None
        self._pool = SnapshotPool()

    @property
    def version(self) -> int:
        """Newest version published; -1 for none."""
        newest = self._newest
        return -1 if newest is None else newest.version

    def newest_for(self, link: WeightLink) -> WeightSnapshot | None:
        return self._newest
