"""Receiver of weights through a store: it reads those that the newest directive names."""

import logging
import time
from contextlib import AbstractContextManager
from typing import Any

from paceline.ids import stored_version
from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.payloads.store import StoreUnavailable
from paceline.process.structured_log import event, first_line
from paceline.process.waits import WaitKind, waiting
from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.stored_weights import RETRY_S, read_weights
from paceline.weights.weight_link import WeightLink
from paceline.weights.weight_manifest import WeightsRefused
from paceline.weights.weight_store import THE_STORE, WeightStore
from rollout_worker.weight_receiver import NotLoaded, WeightReceiver

UNREADABLE_S = 30.0
"""Time after which weights that are missing or damaged in the store are reported."""
_log = logging.getLogger(__name__)


class StoreReceiver(WeightReceiver):
    """A receiver whose links lead through a store: nobody connects to anybody.

    A store that does not answer is asked again for ever: no other link would bring the weights. A
    link fails only if what is in the store cannot be used; then it is stored again."""

    thread_name = "read-weights"

    def __init__(self, store: WeightStore, **given: Any) -> None:
        """Other arguments as for WeightReceiver."""
        super().__init__(**given)
        self._store = store
        self._here: dict[str, ArrivingWeights] = {}
        """By name: the weights that were read last, and those that have begun to come."""
        self._away_since: float | None = None
        self._away_why = ""

    def _serve(self, link: WeightLink) -> None:
        if link.reload or (link.newest is not None and link.newest < self.version):
            self.version = -1
        try:
            self._formed(link, has=self.version)
            while not link.withdrawn.is_set():
                self._await_newer(link)
                self._load_newest(link)
        except EpochCancelled:
            return
        except Exception as error:
            self._failed(link, error)
        finally:
            link.formed, self.reading = False, ""

    def _await_newer(self, link: WeightLink) -> None:
        what = f"waiting for {link.peer} to store weights"
        with waiting(WaitKind.WEIGHTS, what, link.peer), self._changed:
            self._changed.wait_for(lambda: link.withdrawn.is_set() or self._is_newer)

    @property
    def _is_newer(self) -> bool:
        return stored_version(self._named) > self.version

    def _load_newest(self, link: WeightLink) -> None:
        """Reads the newest weights, as often as it takes, and loads them into the engine."""
        refused_since: float | None = None
        self._away_since, self._away_why = None, ""
        while self._is_newer and not link.withdrawn.is_set():
            name = self.reading = self._named
            try:
                self._load(link, name)
                break
            except (StoreUnavailable, NotLoaded) as error:  # The loader counts what is not loaded
                why: Exception = error
                if isinstance(error, StoreUnavailable):
                    self._away_since = self._away_since or time.monotonic()
                    self._away_why = first_line(error)
            except WeightsRefused as error:
                # It may be what is here that is damaged.
                why = error
                self._here.clear()
                refused_since = refused_since or time.monotonic()
                if name == self._named and time.monotonic() - refused_since > UNREADABLE_S:
                    raise
            event(_log, "weights not loaded yet", logging.WARNING, name=name, why=why)
            with self._reading(name):
                link.withdrawn.wait(RETRY_S)
        self.reading = ""

    def _reading(self, name: str) -> AbstractContextManager[None]:
        """Marks the wait: for weights, and for the store from the first attempt that failed."""
        what = f"reading weights {stored_version(name)}"
        if not self._away_since:
            return waiting(WaitKind.WEIGHTS, what)
        return waiting(
            WaitKind.STORE, f"{what} ({self._away_why})", THE_STORE, since=self._away_since
        )

    def _load(self, link: WeightLink, name: str) -> None:
        self._here = {k: w for k, w in self._here.items() if w.complete or k == name}
        with self._reading(name):
            wanted = link.withdrawn.is_set, self._on_arrival
            staged = read_weights(self._store, name, self._here, self.device, *wanted)
        self._hand_over(link, staged)
        read = self._here[name]
        self._here = {name: read} if self._deltas and read.manifest.may_be_sparse else {}
