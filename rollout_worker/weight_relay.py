"""Weight relay: the weights that a rollout worker receives, handed on to others while they arrive.

    link thread of the receiver ── bucket by bucket ──► newest weights ──► link thread ──► other receiver
                                                               └─────────► link thread ──► other
                                                               receiver

What came over a link of an earlier tree is handed on over no link of a later one before the
controller, or the publisher of the later one, has confirmed it: the ledger plants a new tree if a
version has to be taken back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.sending_end import SendingEnd
from paceline.weights.weight_link import LinkKey, WeightLink
from paceline.weights.weight_sending import LifeSign


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
