"""Simulated sending end of weights links, of policy replicas and of rollout workers that hand
weights on."""

from typing import Protocol

from paceline.v1 import worker_pb2
from testbed.simulator.cluster import Cluster
from testbed.simulator.gradient_mesh import Weights
from testbed.simulator.virtual_time import Process

INTERVAL_S = 0.4
"""Between two looks at what receivers lack."""


class Sender(Protocol):
    """The process that sends."""

    name: str
    incarnation: int
    cluster: Cluster
    directive: worker_pb2.Directive


class SentWeights:
    """Versions that receivers have acknowledged."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], int] = {}
        """Version, by epoch of the link and incarnation of the receiver."""

    def offer(self, sender: Sender, process: Process, weights: Weights, tree: int | None) -> None:
        """Sends ``weights`` over every link whose receiver has not got them. ``tree``: of the link
        that they came over; None: the sender has computed them."""
        for link in sender.directive.links:
            mine = (link.publisher.worker_id, link.publisher.incarnation)
            if mine != (sender.name, sender.incarnation) or (tree is not None and tree < link.tree):
                continue
            key = (link.epoch, link.receiver.incarnation)
            receiver = sender.cluster.workers.get(link.receiver.worker_id)
            receive = getattr(receiver, "receive", None)
            if receiver is not None and receive and self._newest.get(key, -1) < weights.version:
                arrived = (link.epoch, weights, process, self.acknowledged)
                sender.cluster.network.send(sender.name, receiver, receive, *arrived)

    def acknowledged(self, link: tuple[int, int], version: int) -> None:
        """``link``: epoch and incarnation of the receiver."""
        self._newest[link] = max(version, self._newest.get(link, -1))

    def forget_after(self, version: int) -> None:
        """The versions after it were not committed: others take their numbers."""
        self._newest = {link: sent for link, sent in self._newest.items() if sent <= version}
