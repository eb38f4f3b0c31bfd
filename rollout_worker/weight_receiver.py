"""Weight receiver: stages new versions beside the running engine.

    links, one after another ──► receiver thread ── StagedWeights ──► on_weights: engine swaps
                                      └── buckets ──► relay

A link is served until another one replaces it. Each rank of a replica that publishes is a source of
the link: it sends its share of the buckets. The next link goes on with an interrupted transfer at
the buckets that are missing. A relay that has nothing to say says so; one that is silent while a
newer version than the one here is known has failed, and its link with it. So has a rank that owes
buckets of a version and sends none.

A relay hands on what the receiver takes, bucket by bucket, while it arrives. What came over a link
of an earlier tree is handed on over no link of a later one before the controller, or the publisher
of the later one, has confirmed it: the ledger plants a new tree if a version has to be taken back.
"""

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.process import threads
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.v1 import worker_pb2
from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.link_messages import RECEIVER, acknowledge, say_hello
from paceline.weights.weight_link import LinkEnd, LinkKey, WeightLink
from paceline.weights.weight_manifest import WeightsRefused
from paceline.weights.weight_sending import LifeSign, SendingEnd
from paceline.weights.weight_snapshot import BUCKET_BYTES
from paceline.weights.weight_transfer import Reception, StagedWeights, receive_snapshot


class NotLoaded(Exception):
    """The engine did not take weights that had come. The loader has counted that."""


class WeightRelay(SendingEnd):
    """The end of the links over which this worker hands weights on."""

    thread_name = "relay"

    def __init__(self, *, life: LifeSign, **ends: Any) -> None:
        """``life``: whether and how often a receiver is told that this worker waits for weights
        itself. Other arguments as for LinkEnd."""
        self.life = life
        self._held: ArrivingWeights | None = None
        super().__init__(**ends)

    def hold(self, weights: ArrivingWeights | None) -> None:
        """Hands these weights on from now on; they may still fill up. Others are given up."""
        with self._changed:
            before, self._held = self._held, weights
            self._changed.notify_all()
        if before is not None and before is not weights:
            before.give_up()

    def confirm(self, tree: int, newest: int | None, *, reload: bool) -> None:
        """A link of ``tree`` has been formed, when ``newest`` was the newest committed version.
        What is held and complete belongs to that tree, if it is not taken back; if it is, it is
        dropped."""
        with self._changed:
            held = self._held
            if held is None:
                return
            taken_back = reload or (newest is not None and held.version > newest)
            if not taken_back and held.complete:
                held.tree = tree
                self._changed.notify_all()
                return
        if held.complete:
            self.hold(None)

    def newest_for(self, link: WeightLink) -> ArrivingWeights | None:
        held = self._held
        return held if held is not None and held.tree >= link.tree else None

    def _converge(self, desired: Mapping[LinkKey, WeightLink]) -> None:
        super()._converge(desired)
        # A thread whose link was withdrawn may wait for a bucket.
        if self._held is not None:
            self._held.wake()


HOLD_CHECK_S = 0.05  # Time after which it is asked again whether an evaluation is under way
SLOW_BYTES_PER_S = 16e6
"""Ranks that send at once share a receiver's bandwidth: their buckets may take this long."""
_SIGNS = 4  # LifeSigns of a relay within the time after which its silence is a failure
_log = logging.getLogger(__name__)


class WeightReceiver(LinkEnd):
    """The receiving end of one link at a time."""

    rank = RECEIVER
    thread_name = "receive"

    def __init__(
        self,
        *,
        on_weights: Callable[[StagedWeights], None],
        evaluating: Callable[[], bool] = lambda: False,
        on_staging_failure: Callable[[Exception], None] = lambda error: None,
        on_arrival: Callable[[], None] = lambda: None,
        deltas: bool = True,
        relays: bool = False,
        stall_s: float = 30.0,
        **ends: Any,
    ) -> None:
        """``on_weights``: called from the receiver's thread with each new version, in rising order;
        the next transfer starts after it returns. ``evaluating``: while it is true, a version that
        has come waits, because an evaluated completion is of one version. ``on_staging_failure``:
        called from that thread if this worker, not the link, is why a version could not be staged.
        ``on_arrival``: called from that thread when a newer version begins to come.
        ``deltas``: keep the newest weights in host memory, so that the next version may come as
        what changed. ``relays``: links may lead from one receiver to another; then the newest
        weights stay in host memory. ``stall_s``: silence after which a relay, or
        a rank that owes buckets, has failed. Other arguments as for LinkEnd."""
        self._deltas = deltas
        self._on_weights = on_weights
        self._evaluating = evaluating
        self._on_staging_failure, self._on_arrival = on_staging_failure, on_arrival
        self._stall_s = stall_s
        self._new_links: queue.SimpleQueue[WeightLink | None] = queue.SimpleQueue()
        """Links to serve; None: no more."""
        self.version = -1  # Newest version handed to on_weights; -1 for none
        self._named = ""
        self.reading = ""
        """Name of the weights that are being read from a store; empty: none."""
        self._base: ArrivingWeights | None = None
        """The weights that came last. They outlive the link: the next one may go on with deltas."""
        self._known, self._known_t = -1, 0.0
        """Newest version that the controller has named, and when it did so first."""
        super().__init__(**ends)
        self.relay: WeightRelay | None = None
        if relays:
            life = LifeSign(stall_s / _SIGNS, self._listens)
            self.relay = WeightRelay(**ends, life=life)
        # Outlives a link, with what the link has left of a transfer.
        self._reception = Reception(
            keep_deltas=relays,
            began=self._began,
            heard=self._heard,
            paid=self._paid,
        )

    def set_link(self, link: worker_pb2.WeightsLink | None, newest: int | None = None) -> None:
        """Converges to this link; another generation replaces the present one. Does not block.
        ``newest``: version that the controller calls the newest. Versions received beyond it were
        never committed, and the new link replaces them by an older one. A link with ``reload``
        replaces them in any case."""
        if newest is not None and newest != self._known:
            self._known, self._known_t = newest, time.monotonic()
        if link is None:
            self._converge({})
            return
        told = (newest, link.reload, link.tree, link.relayed)
        ours = WeightLink(link.epoch, link.publisher.worker_id, *told, heard_t=time.monotonic())
        self._converge({(link.epoch, link.publisher.incarnation): ours})

    def name(self, stored: str) -> None:
        """``stored``: name of the newest weights in the store; empty: there are none."""
        with self._changed:
            self._named = stored
            self._changed.notify_all()

    def close(self) -> None:
        if self.relay is not None:
            self.relay.close()
        super().close()

    def _begin(self, link: WeightLink) -> None:
        self._new_links.put(link)
        if not self._threads:
            self._threads = [threads.start(self._serve_links, self.thread_name)]

    def _withdraw(self) -> None:
        super()._withdraw()
        self._new_links.put(None)

    def _serve_links(self) -> None:
        for link in iter(self._new_links.get, None):
            if not link.withdrawn.is_set():
                self._serve(link)

    def fault_of(self, link: WeightLink) -> str:
        now = time.monotonic()
        owing = list(link.owing.items())
        # All of them send at once, and a bucket is heard of when it is whole.
        limit_s = self._stall_s + len(owing) * BUCKET_BYTES / SLOW_BYTES_PER_S
        for source, heard in owing:
            if now - heard > limit_s:
                silence = f"sent nothing for {limit_s:.3g} s"
                return f"rank {source} of {link.peer} owes weights and {silence}"
        heard_t = link.heard_t
        if not link.relayed or heard_t is None or self._known <= self.version:
            return ""
        if now - max(heard_t, self._known_t) <= self._stall_s:
            return ""
        return f"{link.peer} relays weights and sent nothing for {self._stall_s:g} s"

    def _failed(self, link: WeightLink, error: Exception) -> None:
        if not isinstance(error, MeshError | WeightsRefused | NotLoaded):
            self._on_staging_failure(error)
        super()._failed(link, error)

    def transfer(self, link: WeightLink, mesh: ProcessMesh) -> NoReturn:
        self._link = link
        if link.reload or (link.newest is not None and link.newest < self.version):
            self.version = -1
        sources = [mesh]
        try:
            self._join_others(link, sources, say_hello(mesh, self.version))
            self._formed(link, has=self.version, sources=len(sources))
            self._reception.tree = link.tree
            if self.relay is not None:
                self.relay.confirm(link.tree, link.newest, reload=link.reload)
            while True:
                self._receive_next(link, sources)
        finally:
            for other in sources[1:]:
                other.abandon()

    def _join_others(self, link: WeightLink, sources: list[ProcessMesh], number: int) -> None:
        """Joins the ranks from 1 on of the replica at the other end."""
        formed: list[Future[ProcessMesh]] = [Future() for _ in range(1, number)]

        def form(source: int, mesh: Future[ProcessMesh]) -> None:
            try:
                mesh.set_result(self._form(link, source))
            except Exception as error:
                mesh.set_exception(error)

        for source, mesh in enumerate(formed, 1):
            threads.start(form, f"{self.thread_name}-{link.generation}-{source}", [source, mesh])
        # All are waited for first: what was formed is to be abandoned.
        errors = [mesh.exception() for mesh in formed]
        sources += [mesh.result() for mesh in formed if mesh.exception() is None]
        for source, error in enumerate(errors, 1):
            if isinstance(error, MeshError):
                raise MeshError(f"rank {source} of {link.peer}: {error}")
            if error is not None:
                raise error

    def _receive_next(self, link: WeightLink, sources: Sequence[ProcessMesh]) -> None:
        """Receives one version and loads it into the engine."""
        staged = self._receive(link, sources)
        self._base = staged.base if self._deltas else None
        self._hand_over(link, staged)
        for mesh in sources:
            acknowledge(mesh, staged.version)

    def _hand_over(self, link: WeightLink, staged: StagedWeights) -> None:
        """Loads weights that have come into the engine, if they are still wanted."""
        if self.version >= 0 and self._evaluating():
            with waiting(WaitKind.ENGINE, "generating for an evaluation of the loaded version"):
                while self._evaluating() and not link.withdrawn.wait(HOLD_CHECK_S):
                    pass
        if link.withdrawn.is_set():
            raise EpochCancelled("the link was replaced")
        with waiting(WaitKind.WEIGHTS, f"loading weights {staged.version} into the engine"):
            self._on_weights(staged)
        self.version = staged.version
        self.last_transfer_s = staged.seconds
        ms = staged.seconds * 1e3
        event(_log, "weights staged", generation=link.generation, version=staged.version, ms=ms)

    def _began(self, weights: ArrivingWeights) -> None:
        self._on_arrival()
        if self.relay is not None:
            self.relay.hold(weights)

    def _heard(self, source: int) -> None:
        if source:
            self._link.owing[source] = time.monotonic()
        else:
            self._link.heard_t = time.monotonic()

    def _paid(self, source: int) -> None:
        self._link.owing.pop(source, None)

    def _receive(self, link: WeightLink, sources: Sequence[ProcessMesh]) -> StagedWeights:
        self._heard(0)
        try:
            with waiting(WaitKind.WEIGHTS, f"waiting for weights from {link.peer}", link.peer):
                return receive_snapshot(
                    sources,
                    newer_than=self.version,
                    base=self._base,
                    device=self.device,
                    reception=self._reception,
                )
        except WeightsRefused:
            # It may be the base that is damaged: the next link brings whole buckets.
            self._base = None
            raise
        finally:
            if not link.withdrawn.is_set() and not self.fault_of(link):
                link.heard_t = None

    def _listens(self) -> bool:
        """True if this worker is ready for the next version."""
        with self._changed:
            return all(link.heard_t is not None for link in self._links.values())
