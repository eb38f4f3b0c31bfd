"""Publishing of a replica's weights: a snapshot on the training path, encoding and sending in the
background.

    commit ─► publish_newest ─► slices ─► gathered_shares ─► share of each rank ─► newest snapshot
       └──────── on a stream of its own ─────────┘                                      │
    directive ─► rank 0 ─► LinkNotices ─► the same links on every rank ─► link threads ─► receivers

Each rank of a replica keeps a share of the buckets and is a source of its links.

Training threads may be in a collective for minutes. So notices of links go through the ranks'
key-value store, with threads and connections of their own. Each is the whole present list; the last
rank that has read one deletes it.
"""

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.errors import BadInput
from paceline.ids import Version
from paceline.process import threads
from paceline.process.compute_device import compute_dtype
from paceline.process.structured_log import event, first_line
from paceline.v1 import worker_pb2
from paceline.weights.stored_weights import StoreWriter
from paceline.weights.weight_link import WeightLink
from paceline.weights.weight_manifest import WHOLE_SHARE, Manifest, WeightShard
from paceline.weights.weight_sending import SendingEnd
from paceline.weights.weight_snapshot import BUCKET_BYTES, SnapshotPool, WeightSnapshot, WireDtype
from paceline.weights.weight_store import WeightStore
from policy_worker.model.host_memory import CopyStream
from policy_worker.model.precision import float32_names
from policy_worker.model.train_state import NO_VERSION, TrainState, local_slice
from policy_worker.objectives.objective import POLICY
from policy_worker.ranks.gathered_shares import fill_share
from policy_worker.ranks.operations import on_every_rank
from policy_worker.ranks.rank_group import FOREVER
from policy_worker.rows.replica import Replica


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
        share: WeightShard = WHOLE_SHARE,
        **ends: Any,
    ) -> None:
        """``deltas``: keep the version before, so that the newest may travel as what changed.
        ``on_host``: keep the snapshots in host memory. Other arguments as for LinkEnd."""
        self.share = share
        self.wire = wire or WireDtype()
        self.bucket_bytes = bucket_bytes
        self._deltas = deltas
        self._on_host = on_host
        self._pool = SnapshotPool()
        self._newest: WeightSnapshot | None = None
        self.version = -1
        """Newest version published; -1 for none."""
        self._publications = 0
        super().__init__(**ends)

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Makes these weights the newest version; returns the seconds that the caller spent on it.
        Copies the tensors once and returns; on a CUDA device even the copy runs in the background,
        in the order of the current stream. A version that is not newer is ignored."""
        settings = {"bucket_bytes": self.bucket_bytes, "wire": self.wire}
        take = functools.partial(WeightSnapshot.take, version, named_tensors, self._pool)
        return self._publish(version, functools.partial(take, **settings))

    def publish_share(
        self, version: int, manifest: Manifest, fill: Callable[[Tensor], None]
    ) -> float:
        """Does what publish() does for the share of this rank, which ``fill`` writes to a buffer
        of its size. All ranks of the replica call it with the same versions in the same order."""
        place = version, manifest, self.share, self.device
        take = functools.partial(WeightSnapshot.filled, *place, fill, self._pool)
        return self._publish(version, take)

    def _publish(self, version: int, take: Callable[..., WeightSnapshot]) -> float:
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
            snapshot = take(on_host=self._on_host)
            snapshot.publication = self._publications
            snapshot.follow(base)
            with self._changed:
                self._newest, self.version = snapshot, version
                self._changed.notify_all()
        return time.perf_counter() - started

    def forget(self) -> None:
        """Nobody is to have what was published, and the next version counts as newer, whatever its
        number. No memory of snapshots is kept, except of one that is being sent."""
        with self._changed:
            self._newest, self.version = None, -1
            self.taken_back = self._publications
            self._changed.notify_all()
        self.let_go()

    def let_go(self) -> None:
        """Frees the memory of snapshots that nobody needs."""
        self._pool = SnapshotPool()

    def newest_for(self, link: WeightLink) -> WeightSnapshot | None:
        return self._newest


@dataclass(frozen=True, slots=True)
class PublishingPlace:
    """The place where a replica publishes."""

    url: str
    run_id: str
    host: str
    """Address of rank 0 for receivers, and of ranks that have none of their own."""
    bucket_bytes: int = BUCKET_BYTES


class ReplicaPublisher(WeightPublisher):
    """One rank's end of its replica's links. Made on all ranks, in order."""

    def __init__(
        self,
        state: TrainState,
        replica: Replica,
        device: torch.device,
        place: PublishingPlace,
        on_link_error: Callable[[int, str], None] = lambda generation, why: None,
        on_stored: Callable[[], None] = lambda: None,
    ) -> None:
        config = state.config
        self.state, self.replica = state, replica
        self._accepted = ""  # Name of the newest stored weights that the controller knew
        self._unreadable = False  # What this replica has stored cannot be read: it is stored again
        self.writer: StoreWriter | None = None
        """Writer to the store that links lead through; None: they lead to the receivers."""
        if config.weights.url is not None:
            store = WeightStore(config.weights.url, place.run_id)
            self.writer = StoreWriter(store, replica.identity, device, on_stored)
        self._notices: LinkNotices | None = None
        self._copies = CopyStream(device)
        self._always = config.takes_turns
        """A receiver may come while the state is not on the device."""
        self.last_publish_s = 0.0
        super().__init__(
            url=place.url,
            run_id=place.run_id,
            device=device,
            wire=wire_dtype(state),
            deltas=config.rollout.weight_deltas,
            on_host=config.train.memory.offload_publishing or config.takes_turns,
            bucket_bytes=place.bucket_bytes,
            share=WeightShard(replica.rank, replica.size),
            on_link_error=on_link_error,
            host=replica.host or place.host,
        )
        if replica.store is not None:
            heard = super().set_links
            self._notices = LinkNotices(replica.store, replica.rank, replica.size, heard)

    def set_links(self, links: Sequence[worker_pb2.WeightsLink]) -> None:
        """Rank 0, any thread: all ranks converge to these links. Does not block."""
        super().set_links(links)
        if self._notices is not None:
            self._notices.tell(links)

    @property
    def due(self) -> bool:
        """Receivers are linked to this replica, its present weights are not published, and those
        before them are, if it is to a store."""
        due = bool(self._links) and self.state.version not in (self.version, NO_VERSION)
        return self._unreadable or (due and not self._busy)

    @property
    def _busy(self) -> bool:
        return self.writer is not None and self.writer.busy

    @property
    def stored(self) -> str:
        """Name of the newest weights of this replica that are complete in the store."""
        return "" if self.writer is None else self.writer.stored

    def note_stored(self, name: str) -> None:
        """Rank 0, any thread: ``name`` is the newest in the store that workers can read."""
        if name:
            self._accepted = name
        elif self.stored and self.stored == self._accepted:
            self._unreadable = True

    def publish_newest(self) -> None:
        """Rank 0: publishes the present weights if that is due. A replica that feeds nobody keeps
        no copy of earlier ones, unless it takes turns."""
        version = self.state.version
        if self._unreadable:
            self._unreadable = False
            self.take_back()
        if version in (self.version, NO_VERSION):
            return
        if self._busy:
            if not self._always:
                return
            # It may park now, and then publishes nothing: what is being written gives way.
            self.take_back()
        if not (self._links or self._always):
            if self.version != NO_VERSION:
                self.take_back()
            return
        if POLICY not in self.state.parts:
            # They would wait for ever.
            raise BadInput(
                "the objective trains no language model, and rollout workers wait for its weights: "
                'train it on recorded data (rollout.source = "recorded"), where no engine runs'
            )
        self.last_publish_s = self.publish_state(version)

    @on_every_rank
    def publish_state(self, version: Version) -> float:
        """Makes the present weights the newest version; returns the seconds that it took. On a GPU
        the copies go on beside training: call ``before_change`` before the weights are changed.
        With several ranks they gather them on the communicator of FSDP2's gathers, so the next
        forward's first gather comes after it."""
        with self._copies.beside(self._copies.reached()):
            weights = self._weights()
            if self.replica.size == 1:
                return self.publish(version, weights)
            stored = [(local_slice(w)[0], isinstance(w, DTensor)) for _, w in weights]

            def fill(flat: Tensor) -> None:
                fill_share(flat, self._manifest, self.share, stored, self.replica.all_gather)

            return self.publish_share(version, self._manifest, fill)

    @on_every_rank
    def take_back(self) -> None:
        """Forgets what was published: it was never committed, or has no receivers."""
        self.forget()

    def forget(self) -> None:
        if self.writer is not None:
            self.writer.forget()
        super().forget()

    def before_change(self) -> None:
        """Has the device do nothing more before the copies: it may change the weights."""
        self._copies.await_(self._copies.end)

    def close(self) -> None:
        if self._notices is not None:
            self._notices.close()
        super().close()

    def _publish(self, version: int, take: Callable[..., WeightSnapshot]) -> float:
        seconds, newest = super()._publish(version, take), self._newest
        if self.writer and newest and newest.publication == self._publications:
            self.writer.write(newest)
        return seconds

    def _begin(self, link: WeightLink) -> None:
        # Through a store nobody connects to anybody.
        if self.writer is None:
            super()._begin(link)

    def _weights(self) -> list[tuple[str, Tensor]]:
        return list(self.state.weights_of(POLICY)) if POLICY in self.state.parts else []

    @functools.cached_property
    def _manifest(self) -> Manifest:
        """Raises ValueError for a weight that is not sliced by rows."""
        layout = []
        for name, weight in self._weights():
            if isinstance(weight, DTensor) and not weight.placements[0].is_shard(0):
                raise ValueError(f"{name} is sliced along another dimension than the first")
            layout.append((name, torch.empty(weight.shape, dtype=weight.dtype, device="meta")))
        return Manifest.of(layout, bucket_bytes=self.bucket_bytes, dtype=self.wire.of)


def wire_dtype(state: TrainState) -> WireDtype:
    """The engine's type; some models keep a few tensors in float32 (a router's bias)."""
    config, policy = state.config, state.parts.get(POLICY)
    if policy is None:
        return WireDtype()
    device = next(policy.parameters()).device.type
    dtype = compute_dtype(config.model, device, config.rollout.dtype)
    if dtype == "float32":
        return WireDtype()
    return WireDtype(getattr(torch, dtype), frozenset(float32_names(policy)))


log = logging.getLogger(__name__)

_END = b"-"


class LinkNotices:
    """One rank's end of the notices."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        heard: Callable[[Sequence[worker_pb2.WeightsLink]], None],
    ) -> None:
        """On ranks above 0 ``heard`` is called with each notice, from one thread."""
        # A clone has its own connection: a blocking get would hold up every other user of it.
        self._store = store.clone()
        self._store.set_timeout(FOREVER)
        self._readers = size - 1
        self._newest: Sequence[worker_pb2.WeightsLink] = []
        self._unsent: SimpleQueue[bytes] = SimpleQueue()
        if rank == 0:
            threads.on_exit(self.close)
        run, given = (self._read, [heard]) if rank else (self._send, [])
        threads.start(run, "link-notices", given)

    def tell(self, links: Sequence[worker_pb2.WeightsLink]) -> None:
        """Rank 0: from now on there are these links. Does not block."""
        # A directive that concerns something else names the links again.
        if (told := list(links)) != self._newest:
            self._newest = told
            self._unsent.put(worker_pb2.Directive(links=told).SerializeToString())

    def close(self) -> None:
        """Rank 0: the others read no further."""
        self._unsent.put(_END)

    def _send(self) -> None:
        for number in itertools.count():
            packed = self._unsent.get()
            try:
                self._store.set(f"links/{number}", packed)
            except RuntimeError as error:  # the store's server has ended, and soon this replica
                why = first_line(error)
                event(log, "links not sent to the other ranks", logging.WARNING, why=why)
                return
            if packed == _END:
                return

    def _read(self, heard: Callable[[Sequence[worker_pb2.WeightsLink]], None]) -> None:
        for number in itertools.count():
            try:
                key = f"links/{number}"
                packed = self._store.get(key)
                if self._store.add(f"{key}/read", 1) == self._readers:
                    self._store.delete_key(key)
                    self._store.delete_key(f"{key}/read")
            except RuntimeError as error:
                event(log, "link notices ended", logging.INFO, why=first_line(error))
                return
            if packed == _END:
                return
            heard(worker_pb2.Directive.FromString(packed).links)
