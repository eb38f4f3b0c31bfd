"""Notices of weights links: rank 0 tells the other ranks of its replica which links there are,
beside their collectives.

Training threads may be in a collective for minutes. So notices go through the ranks' key-value
store, with threads and connections of their own. Each notice is the whole present list; the last
rank that has read one deletes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import torch.distributed as dist

from paceline.process import threads
from paceline.process.structured_log import event, first_line
from paceline.v1 import worker_pb2
from policy_worker.ranks.rank_group import FOREVER

log = logging.getLogger(__name__)

_END = b"-"


class LinkNotices:
    """One rank's end of the notices."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._rank, self._readers = rank, size - 1
        # A clone has its own connection: a blocking get would hold up every other user of it.
        self._store = store.clone()
        self._store.set_timeout(FOREVER)
        self._changed = threading.Condition()
        self._newest: Sequence[worker_pb2.WeightsLink] = []
        self._links: Sequence[worker_pb2.WeightsLink] | None = None
        self._closed = False

    def tell(self, links: Sequence[worker_pb2.WeightsLink]) -> None:
        """Rank 0: from now on there are these links. Does not block; of several lists the newest
        counts."""
        with self._changed:
            # A directive that concerns something else names the links again.
            if (told := list(links)) != self._newest:
                self._links = self._newest = told
                self._changed.notify_all()

    def start(self, set_links: Callable[[Sequence[worker_pb2.WeightsLink]], None]) -> None:
        """Ranks above 0 call ``set_links`` with each notice, from one thread."""
        if self._rank == 0:
            threads.on_exit(self.close)
            threads.start(self._send, "link-notices")
        else:
            threads.start(self._read, "link-notices", [set_links])

    def close(self) -> None:
        """Rank 0: the others read no further."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _send(self) -> None:
        number = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._links is not None)
                links, self._links = self._links, None
            packed = worker_pb2.Directive(links=links or ()).SerializeToString()
            try:
                self._store.set(f"links/{number}", _END if links is None else packed)
            except RuntimeError as error:  # the store's server has ended, and soon this replica
                why = first_line(error)
                event(log, "links not sent to the other ranks", logging.WARNING, why=why)
                return
            if links is None:
                return
            number += 1

    def _read(self, set_links: Callable[[Sequence[worker_pb2.WeightsLink]], None]) -> None:
        number = 0
        while True:
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
            set_links(worker_pb2.Directive.FromString(packed).links)
            number += 1
