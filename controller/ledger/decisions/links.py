"""Decisions about the weights links: one for every living rollout worker, from whom it receives.

Without relays all receive from one replica. With ``relay_fanout`` the links are a tree below that replica:

- A receiver whose link from a relay breaks gets the next one from the replica. Between two versions those that are too
  many for the replica move below relays again.
- If the replica changes, or a version is taken back, a new tree is planted: a relay hands nothing on over its links that
  came over links of an earlier one, unless it is known to be committed.
"""

from __future__ import annotations

from controller.ledger import commands as cmd
from controller.ledger import events as ev
from controller.ledger.decisions.decider import Decider
from controller.ledger.decisions.relay_tree import RelayTree
from controller.ledger.enums import Phase, Role
from controller.ledger.state.fleet import Worker


def settle_links(d: Decider) -> None:
    """One link for every living rollout worker, if a replica holds the newest state. Those of recorded data
    load no weights."""
    s = d.state
    if s.ended or s.phase is Phase.SUSPENDED or (s.facts is not None and s.facts.recorded):
        return
    publisher = s.fleet.publisher(s.versions.version)
    if publisher is None:
        return
    roots = s.fleet.roots()
    failing = {w.worker_id for w in roots if not _serves(d, w)}
    fanout = _fanout(d)
    if fanout and failing:
        _plant(d, publisher)
        return
    links = s.fleet.links
    if not failing and len(links) == s.fleet.count(Role.ROLLOUT):
        # A link ends with each of its ends, so everyone has one.
        if fanout and roots and s.fleet.sends_to(roots[0].worker_id) > fanout:
            _relieve(d, roots[0])
        return
    without = [
        receiver
        for receiver in s.fleet.living(Role.ROLLOUT)
        if (link := links.get(receiver.worker_id)) is None or link.publisher in failing
    ]
    if not fanout:
        for receiver in without:
            _assign(d, publisher, receiver)
        return
    root = roots[0] if roots else publisher
    tree = RelayTree(s.fleet, root, fanout)
    for receiver in without:
        _assign(d, tree.attach(receiver), receiver)


def _fanout(d: Decider) -> int:
    facts = d.state.facts
    return 0 if facts is None else facts.relay_fanout


def _serves(d: Decider, root: Worker) -> bool:
    """Links stay with their replica while that is a member and holds the newest state."""
    member = d.state.fleet.in_mesh(root.worker_id, root.incarnation)
    return member and root.state_version == d.state.versions.version


def _plant(d: Decider, root: Worker) -> None:
    """A new tree of links for all receivers."""
    fleet = d.state.fleet
    number = fleet.link_epoch + 1
    tree = RelayTree(None, root, _fanout(d))
    for receiver in fleet.living(Role.ROLLOUT):
        _assign(d, tree.attach(receiver), receiver, tree=number)


def _relieve(d: Decider, root: Worker) -> None:
    """The replica sends to more than its share: the newest of its receivers that has followed it moves below a relay
    that has room."""
    fleet, newest = d.state.fleet, d.state.versions.version
    following = (w for w in fleet.receivers_of(root)[::-1] if newest - w.loaded_version <= 1)
    receiver = next(following, None)
    if receiver is None:
        return
    parent = RelayTree(fleet, root, _fanout(d), without=receiver.worker_id).parent_of(receiver)
    if parent is not root:
        _assign(d, parent, receiver)


def break_link(d: Decider, c: cmd.BreakLink, now: float) -> None:
    d.caller(c.worker_id, c.incarnation)
    fleet = d.state.fleet
    link = next((x for x in fleet.links.values() if x.epoch == c.epoch), None)
    if link is None or c.worker_id not in (link.publisher, link.receiver):
        return
    publisher = fleet.publisher(d.state.versions.version)
    receiver = fleet.current(link.receiver, link.receiver_incarnation)
    if publisher is None or receiver is None:
        return
    root = next((w for w in fleet.roots() if _fanout(d) and _serves(d, w)), publisher)
    sender = fleet.current(link.publisher, link.publisher_incarnation)
    relayed = sender is not None and sender.role is Role.ROLLOUT
    blamed = link.publisher if relayed and c.worker_id == link.receiver else ""
    _assign(d, root, receiver, blames=blamed)


def renew_link(d: Decider, publisher: Worker, receiver: Worker) -> None:
    """The receiver has a version that was never committed, and so may have what hangs on it."""
    s = d.state
    if not _fanout(d):
        _assign(d, publisher, receiver)
    # Only a new term can have lost a commit: a tree that was planted in it at the present version has new links for all.
    elif s.fleet.tree_planted != (s.term, s.versions.version):
        _plant(d, publisher)


def _assign(
    d: Decider, publisher: Worker, receiver: Worker, *, tree: int | None = None, blames: str = ""
) -> None:
    fleet = d.state.fleet
    epoch = fleet.link_epoch + 1
    if tree is None:
        # The first link of a run plants the first tree.
        tree = (fleet.tree or epoch) if _fanout(d) else 0
    d.emit(
        ev.LinkAssigned(
            epoch=epoch,
            publisher=publisher.worker_id,
            publisher_incarnation=publisher.incarnation,
            receiver=receiver.worker_id,
            receiver_incarnation=receiver.incarnation,
            reload=receiver.withdrawn_version >= d.state.versions.version,
            tree=tree,
            blames=blames,
        )
    )
