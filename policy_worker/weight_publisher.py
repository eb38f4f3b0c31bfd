"""Weight publisher: a snapshot on the training path, encoding and sending in the background.

training thread ── publish(v) ──► newest snapshot ──► link thread ──► receiver
                                         └──────────► link thread ──► receiver

Each rank of a replica has one. Its snapshots are of the rank's share of the buckets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from paceline.weights.sending_end import SendingEnd
from paceline.weights.weight_link import WeightLink
from paceline.weights.weight_snapshot import BUCKET_BYTES, SnapshotPool, WeightSnapshot, WireDtype
from paceline.weights.wire.weight_manifest import Manifest
from paceline.weights.wire.weight_share import WHOLE_SHARE, WeightShare


class WeightPublisher(SendingEnd):
    """A trainer's end of any number of links, or that of one of its ranks."""

    thread_name = "publish"

    def __init__(
        self,
        *,
        wire: WireDtype | None = None,
        deltas: bool = True,
        on_host: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        share: WeightShare = WHOLE_SHARE,
        **ends: Any,
    ) -> None:
        """``wire``: the type in which weights travel; default: the tensors' own. ``deltas``: keep
        the version before, so that the newest may travel as what changed. ``on_host``: keep the
        snapshots in host memory. ``bucket_bytes``: what is checked, kept and handed on at once.
        ``share``: of this rank. Other arguments as for LinkEnd.
        """
        self.share = share
        self.wire = wire or WireDtype()
        self.bucket_bytes = bucket_bytes
        self._deltas = deltas
        self._on_host = on_host
        self._pool = SnapshotPool()
        self._newest: WeightSnapshot | None = None
        self._version = -1
        self._publications = 0
        super().__init__(**ends)

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Tensor]],
        layout: Sequence[tuple[str, Tensor]] | None = None,
    ) -> float:
        """Makes these weights the newest version; returns the seconds that the caller spent on it.

        Copies the tensors once and returns; on a CUDA device even the copy runs in the background,
        in the order of the current stream. A version that is not newer is ignored. ``layout``: see
        WeightSnapshot.take().
        """
        return self._publish(
            version,
            lambda: WeightSnapshot.take(
                version,
                named_tensors,
                self._pool,
                bucket_bytes=self.bucket_bytes,
                wire=self.wire,
                layout=layout,
                on_host=self._on_host,
            ),
        )

    def publish_share(
        self, version: int, manifest: Manifest, fill: Callable[[Tensor], None]
    ) -> float:
        """As publish(), for the share of this rank, which ``fill`` writes to a buffer of its size.
        All ranks of the replica call it with the same versions in the same order."""
        return self._publish(
            version,
            lambda: WeightSnapshot.filled(
                version,
                manifest,
                self.share,
                self.device,
                fill,
                self._pool,
                on_host=self._on_host,
            ),
        )

    def _publish(self, version: int, take: Callable[[], WeightSnapshot]) -> float:
        started = time.perf_counter()
        self._publications += 1
        if version > self.version:
            base = self._newest
            if base is not None:
                # One base is kept: a receiver that has an earlier version gets whole buckets.
                base.forget_base()
                if not (self._deltas and base.manifest.may_be_sparse):
                    # No base at all: its memory is for the next version, unless a link still sends
                    # it.
                    with self._changed:
                        self._newest = base = None
            snapshot = take()
            snapshot.publication = self._publications
            snapshot.follow(base)
            with self._changed:
                self._newest, self._version = snapshot, version
                self._changed.notify_all()
        return time.perf_counter() - started

    def forget(self) -> None:
        """The published version was never committed: the next one counts as newer, whatever its
        number."""
        with self._changed:
            self._newest, self._version = None, -1
            self.taken_back = self._publications
            self._changed.notify_all()

    def free(self) -> None:
        """Keeps no memory of snapshots, except of one that is being sent."""
        self.forget()
        self._pool = SnapshotPool()

    @property
    def version(self) -> int:
        """Newest version published; -1 for none."""
        return self._version

    def newest_for(self, link: WeightLink) -> WeightSnapshot | None:
        return self._newest
