"""Relay tree: which worker sends weights to which, so that none sends to more than a few.

    policy replica (root) ──► rollout worker ──► rollout worker ...
                         └──► rollout worker ──► ...

- A receiver's publisher is one of its own host if that has room, else the one nearest to the root.
- The root has room for everybody: if no relay has any, or the relays have failed, it sends more copies.
- A worker never receives from what hangs on itself.
"""

from __future__ import annotations

from collections import deque

from controller.ledger.state.fleet import Fleet, Worker

RELAY_FAULTS = 3
"""Links from a relay that may break before no more are given to it. One is forgiven every few versions (Fleet.forgive),
and all with the next tree."""


class RelayTree:
    """The workers that receive from ``root``, directly or not, and the room that they have for others."""

    def __init__(
        self, fleet: Fleet | None, root: Worker, fanout: int, *, without: str = ""
    ) -> None:
        """Of the links of ``fleet``; None: of no links yet. ``without``: a receiver that is left out, with all that
        hang on it."""
        self.root = root
        self._fleet = fleet
        self._fanout = fanout
        self._without = without
        self._room: dict[str, int] = {}
        self._open: deque[Worker] = deque()
        self._by_host: dict[str, deque[Worker]] = {}
        self._add(root)

    def parent_of(self, receiver: Worker) -> Worker:
        """The publisher for a receiver that is not in the tree."""
        for nodes in (self._by_host.get(receiver.host), self._open):
            while nodes and self._room[nodes[0].worker_id] <= 0:
                nodes.popleft()
            if nodes:
                return nodes[0]
        return self.root

    def attach(self, receiver: Worker) -> Worker:
        """Puts the receiver, with all that hang on it, into the tree; returns its publisher."""
        parent = self.parent_of(receiver)
        self._room[parent.worker_id] -= 1
        self._add(receiver)
        return parent

    def _add(self, worker: Worker) -> None:
        nodes = deque([worker])
        while nodes:
            node = nodes.popleft()
            below = [] if self._fleet is None else self._fleet.receivers_of(node)
            below = [w for w in below if w.worker_id != self._without]
            # Faults are of earlier trees if this is a new one.
            failing = self._fleet is not None and node.relay_faults >= RELAY_FAULTS
            may_send = node is self.root or not (node.leaving or failing)
            self._room[node.worker_id] = (self._fanout if may_send else 0) - len(below)
            self._open.append(node)
            self._by_host.setdefault(node.host, deque()).append(node)
            nodes.extend(below)
