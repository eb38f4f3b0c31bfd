"""Relay trees: which worker sends weights to which, so that none sends to more than a few.

    policy replica (root) ──► rollout worker ──► rollout worker ...
                         └──► rollout worker ──► ...
    policy replica (root) ──► rollout worker ──► ...

- A receiver's publisher is one of its own host if that has room, else the one nearest to a root. Of
  several roots it is the one that sends to the fewest.
- The roots have room for everybody: if no relay has any, or the relays have failed, they send more
  copies.
- A worker never receives from what hangs on itself.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from controller.ledger.state.fleet import Fleet, Worker

RELAY_FAULTS = 3
"""Links from a relay that may break before no more are given to it. One is forgiven every
``FORGIVEN_EVERY`` versions, and all with the next tree."""


class RelayTree:
    """The workers that receive from ``roots``, directly or not, and their room for others."""

    def __init__(
        self, fleet: Fleet | None, roots: Sequence[Worker], fanout: int, *, without: str = ""
    ) -> None:
        """A tree of the links of ``fleet``; None: of no links yet. ``fanout``: 0 for no relays.
        ``without``: a receiver that is left out, with all that hang on it."""
        self._fleet = fleet
        self._fanout = fanout
        self._without = without
        self._sends: dict[str, int] = {}
        self._relays: deque[Worker] = deque()  # Nearest to a root first. Some have no room left.
        self._relays_of: dict[str, deque[Worker]] = {}
        self._roots_of: dict[str, list[Worker]] = {}  # Both by host
        self._roots = roots
        for root in roots:
            self._sends[root.worker_id] = len(self._below(root))
            self._roots_of.setdefault(root.host, []).append(root)
        if fanout:
            self._add(receiver for root in roots for receiver in self._below(root))

    def least_root(self) -> Worker:
        """The root that sends to the fewest, the first of equals. There are few roots."""
        return min(self._roots, key=self._load)

    def parent_of(self, receiver: Worker) -> Worker:
        """The publisher for a receiver that is not in the tree."""
        least = self.least_root()
        if not self._fanout:
            return least
        near = min(self._roots_of.get(receiver.host, ()), key=self._load, default=None)
        for root, relays in ((near, self._relays_of.get(receiver.host)), (least, self._relays)):
            if root is not None and self._load(root) < self._fanout:
                return root
            while relays and self._load(relays[0]) >= self._fanout:
                relays.popleft()
            if relays:
                return relays[0]
        return least

    def attach(self, receiver: Worker) -> Worker:
        """Puts the receiver, with all that hang on it, into the tree; returns its publisher."""
        parent = self.parent_of(receiver)
        self._sends[parent.worker_id] += 1
        if self._fanout:
            self._add([receiver])
        return parent

    def _load(self, worker: Worker) -> int:
        return self._sends[worker.worker_id]

    def _below(self, worker: Worker) -> list[Worker]:
        if self._fleet is None:
            return []
        return [w for w in self._fleet.receivers_of(worker) if w.worker_id != self._without]

    def _add(self, workers: Iterable[Worker]) -> None:
        """Relays with all that hang on them, level by level."""
        level = list(workers)
        while level:
            following: list[Worker] = []
            for relay in level:
                below = self._below(relay)
                # Faults are of earlier trees if this is a new one.
                failing = self._fleet is not None and relay.relay_faults >= RELAY_FAULTS
                may_send = not (relay.leaving or failing)
                self._sends[relay.worker_id] = len(below) if may_send else self._fanout
                if may_send:
                    self._relays.append(relay)
                    self._relays_of.setdefault(relay.host, deque()).append(relay)
                following.extend(below)
            level = following


def subtree_to_hand_over(fleet: Fleet, roots: Sequence[Worker]) -> Worker | None:
    """The receiver that, with all that hang on it, is to hang on a root that feeds nobody: as many
    as come to each root, and rather one whose weights come from another host. None: every root but
    that one feeds one receiver alone."""
    nodes = [(receiver, root) for root in roots for receiver in fleet.receivers_of(root)]
    for receiver, _ in nodes:
        nodes.extend((below, receiver) for below in fleet.receivers_of(receiver))
    sizes = {receiver.worker_id: 1 for receiver, _ in nodes}
    at_root = {root.worker_id: fleet.sends_to(root.worker_id) for root in roots}
    for receiver, publisher in reversed(nodes):
        if publisher.worker_id in sizes:
            sizes[publisher.worker_id] += sizes[receiver.worker_id]
    share = max(1, len(nodes) // len(roots))
    movable = [
        (receiver.host == publisher.host, abs(sizes[receiver.worker_id] - share), n)
        for n, (receiver, publisher) in enumerate(nodes)
        if at_root.get(publisher.worker_id) != 1
    ]
    return nodes[min(movable)[-1]][0] if movable else None
