"""Decisions about the weights links: one for every living rollout worker, from whom it receives.

Every replica of the mesh that holds the newest state is a source: their weights are equal in every
bit, so receivers are dealt out over them, and one that loses its source goes on with another's
buckets. With ``relay_fanout`` the links are trees below the sources:

- A receiver whose link from a relay breaks gets the next one from a source. Between two versions
  those that are too many for it move below relays again.
- A source that feeds nobody takes over a part of the trees.
- A source that feeds nobody has no copy of the weights to send. A replica of several ranks makes
  one between two steps only, so during a step it is given no receiver that waits for the newest
  version.
- If a source loses its state, or a version is taken back, new trees are planted: a relay hands
  nothing on over its links that came over links of an earlier one, unless it is known to be
  committed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from controller.ledger import commands as cmd
from controller.ledger import events as ev
from controller.ledger.decisions.decider import Decider, decides
from controller.ledger.decisions.relay_tree import RelayTree, subtree_to_hand_over
from controller.ledger.enums import Phase, Role
from controller.ledger.state.fleet import Worker


def settle_links(d: Decider) -> None:
    """One link for every living rollout worker, if a replica holds the newest state. Those of
    recorded data load no weights."""
    s = d.state
    if s.ended or s.phase is Phase.SUSPENDED or (s.run_spec is not None and s.run_spec.recorded):
        return
    fleet = s.fleet
    sources = fleet.sources(s.versions.version)
    if not sources:
        return
    serving = {w.worker_id for w in sources}
    failing = [w for w in fleet.roots() if w.worker_id not in serving]
    if _fanout(d) and not all(_left(d, w) for w in failing):
        _plant(d, sources)
        return
    # A link ends with each of its ends.
    if failing or len(fleet.links) < fleet.count(Role.ROLLOUT):
        _link_the_rest(d, sources, {w.worker_id for w in failing})
    # Once the whole mesh has the state, and not for each member that comes to it.
    complete = len(sources) == len(fleet.members())
    if _fanout(d):
        _reshape_trees(d, sources, complete)
    elif complete:
        _deal_out(d, sources)


def _fanout(d: Decider) -> int:
    spec = d.state.run_spec
    return 0 if spec is None else spec.relay_fanout


def _left(d: Decider, root: Worker) -> bool:
    """It has left the mesh with the newest state: what it has sent stays."""
    fleet, newest = d.state.fleet, d.state.versions.version
    return root.state_version == newest and not fleet.in_mesh(root.worker_id, root.incarnation)


def _plant(d: Decider, sources: Sequence[Worker]) -> None:
    """New trees of links for all receivers."""
    fleet = d.state.fleet
    number = fleet.link_generation + 1
    tree = RelayTree(None, sources, _fanout(d))
    for receiver in fleet.living(Role.ROLLOUT):
        _assign(d, tree.attach(receiver), receiver, tree=number)


def _link_the_rest(d: Decider, sources: Sequence[Worker], failing: set[str]) -> None:
    """Links for those that have none, or one from a replica that has left."""
    links = d.state.fleet.links
    without = [
        receiver
        for receiver in d.state.fleet.living(Role.ROLLOUT)
        if (link := links.get(receiver.worker_id)) is None or link.publisher in failing
    ]
    tree = RelayTree(d.state.fleet, _ready(d, sources), _fanout(d))
    for receiver in without:
        _assign(d, tree.attach(receiver), receiver)


def _publishes_at_once(d: Decider, sources: Sequence[Worker]) -> bool:
    """Whether a source that feeds nobody can send the newest version soon. All replicas have
    equally many ranks."""
    return d.state.steps.open is None or sources[0].ranks == 1


def _ready(d: Decider, sources: Sequence[Worker]) -> Sequence[Worker]:
    """Those that can send the newest version soon, if there are any."""
    if _publishes_at_once(d, sources):
        return sources
    return [w for w in sources if d.state.fleet.sends_to(w.worker_id)] or sources


def _deal_out(d: Decider, sources: Sequence[Worker]) -> None:
    """Without relays: none sends to more than its share. Those with the oldest links move: a link
    that broke is not given back to the source that it came from."""
    fleet = d.state.fleet
    share = -(-len(fleet.links) // len(sources))
    over = [w for w in sources if fleet.sends_to(w.worker_id) > share]
    if not over:
        return
    newest, at_once = d.state.versions.version, _publishes_at_once(d, sources)
    tree = RelayTree(fleet, sources, 0)
    for source in over:
        surplus = fleet.sends_to(source.worker_id) - share
        movable = (w for w in fleet.receivers_of(source) if at_once or w.loaded_version == newest)
        for receiver in islice(movable, surplus):
            _assign(d, tree.attach(receiver), receiver)


def _reshape_trees(d: Decider, sources: Sequence[Worker], complete: bool) -> None:
    """One change for the better of the trees, if they need one. ``complete``: no further source is
    about to come."""
    fleet, fanout = d.state.fleet, _fanout(d)
    sends = [fleet.sends_to(w.worker_id) for w in sources]
    most = max(sends)
    if most > fanout:
        _relieve(d, sources, sources[sends.index(most)])
    elif complete and 0 in sends and len(fleet.links) > len(sources) - sends.count(0):
        receiver = subtree_to_hand_over(fleet, sources)
        at_once, newest = _publishes_at_once(d, sources), d.state.versions.version
        if receiver is not None and (at_once or receiver.loaded_version == newest):
            _assign(d, sources[sends.index(0)], receiver)


def _relieve(d: Decider, sources: Sequence[Worker], root: Worker) -> None:
    """The replica sends to more than its share: the newest of its receivers that has followed it
    moves below a relay that has room."""
    fleet, newest = d.state.fleet, d.state.versions.version
    following = (w for w in fleet.receivers_of(root)[::-1] if newest - w.loaded_version <= 1)
    receiver = next(following, None)
    if receiver is None:
        return
    tree = RelayTree(fleet, sources, _fanout(d), without=receiver.worker_id)
    parent = tree.parent_of(receiver)
    if parent is not root:
        _assign(d, parent, receiver)


@decides
def break_link(d: Decider, c: cmd.BreakLink, now: float) -> None:
    d.caller(c.worker_id, c.incarnation)
    fleet = d.state.fleet
    link = next((x for x in fleet.links.values() if x.generation == c.generation), None)
    if link is None or c.worker_id not in (link.publisher, link.receiver):
        return
    sources = fleet.sources(d.state.versions.version)
    receiver = fleet.current(link.receiver, link.receiver_incarnation)
    if not sources or receiver is None:
        return
    # The network between these two may be at fault.
    ready = _ready(d, sources)
    others = [w for w in ready if w.worker_id != link.publisher] or ready
    sender = fleet.current(link.publisher, link.publisher_incarnation)
    relayed = sender is not None and sender.role is Role.ROLLOUT
    blamed = link.publisher if relayed and c.worker_id == link.receiver else ""
    _assign(d, RelayTree(fleet, others, 0).least_root(), receiver, blames=blamed)


def renew_link(d: Decider, receiver: Worker) -> None:
    """The receiver has a version that was never committed, and so may have what hangs on it."""
    s = d.state
    sources = s.fleet.sources(s.versions.version)
    if not sources:
        return
    if not _fanout(d):
        _reassign(d, sources, [receiver])
    # Only a new term can have lost a commit: a tree that was planted in it at the present version
    # has new links for all.
    elif s.fleet.tree_planted != (s.term, s.versions.version):
        _plant(d, sources)


def take_back(d: Decider, receivers: Iterable[str]) -> None:
    """What these receivers have of the newest version was withdrawn: they get it again over new
    links."""
    fleet = d.state.fleet
    sources = fleet.sources(d.state.versions.version)
    if not sources:
        return
    if _fanout(d):
        _plant(d, sources)
    else:
        _reassign(d, sources, [fleet.workers[worker_id] for worker_id in receivers])


def _reassign(d: Decider, sources: Sequence[Worker], receivers: Iterable[Worker]) -> None:
    """New links for the receivers, from the source that each has if that still is one."""
    fleet, tree = d.state.fleet, RelayTree(d.state.fleet, sources, 0)
    known = {w.worker_id: w for w in sources}
    for receiver in receivers:
        link = fleet.links.get(receiver.worker_id)
        own = None if link is None else known.get(link.publisher)
        _assign(d, own or tree.attach(receiver), receiver)


def _assign(
    d: Decider, publisher: Worker, receiver: Worker, *, tree: int | None = None, blames: str = ""
) -> None:
    fleet = d.state.fleet
    generation = fleet.link_generation + 1
    if tree is None:
        # The first link of a run plants the first tree.
        tree = (fleet.tree or generation) if _fanout(d) else 0
    d.emit(
        ev.LinkAssigned(
            generation=generation,
            publisher=publisher.worker_id,
            publisher_incarnation=publisher.incarnation,
            receiver=receiver.worker_id,
            receiver_incarnation=receiver.incarnation,
            reload=receiver.withdrawn_version >= d.state.versions.version,
            tree=tree,
            blames=blames,
        )
    )
