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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from controller.ledger import events as ev
from controller.ledger.decisions.commands import Decider, of_worker
from controller.ledger.decisions.relay_tree import RelayTree, subtree_to_hand_over
from controller.ledger.enums import Phase, Role
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State


@dataclass(frozen=True, slots=True)
class Wanted:
    """A link that is to be assigned."""

    publisher: Worker
    receiver: Worker
    tree: int | None = None  # Number of the new tree that it belongs to; None: the present one
    blames: str = ""  # Relay from which the receiver's link before broke


def settle_links(d: Decider) -> None:
    """One link for every living rollout worker, if a replica holds the newest state; then those
    that spread the sending better. Those of recorded data load no weights."""
    s = d.state
    if s.ended or s.phase is Phase.SUSPENDED or (s.run_spec is not None and s.run_spec.recorded):
        return
    if s.fleet.sources(s.versions.version):
        _assign(d, lacking(s))
        _assign(d, better(s))


def lacking(s: State) -> list[Wanted]:
    """Links for the receivers that have none, or one from a replica without the newest state."""
    fleet, sources = s.fleet, s.fleet.sources(s.versions.version)
    serving = {w.worker_id for w in sources}
    failing = [w for w in fleet.roots() if w.worker_id not in serving]
    if _fanout(s) and not all(_left(s, w) for w in failing):
        return _new_tree(s, sources)
    # A link ends with each of its ends.
    if not failing and len(fleet.links) >= fleet.count(Role.ROLLOUT):
        return []
    without = {None, *(w.worker_id for w in failing)}
    publisher_of = {receiver: link.publisher for receiver, link in fleet.links.items()}
    tree = RelayTree(fleet, _ready(s, sources), _fanout(s))
    return [
        Wanted(tree.attach(receiver), receiver)
        for receiver in fleet.living(Role.ROLLOUT)
        if publisher_of.get(receiver.worker_id) in without
    ]


def better(s: State) -> list[Wanted]:
    """Links that spread the sending better than the present ones; usually there are none."""
    sources = s.fleet.sources(s.versions.version)
    # Once the whole mesh has the state, and not for each member that comes to it.
    complete = len(sources) == len(s.fleet.members())
    if _fanout(s):
        return _better_tree(s, sources, complete=complete)
    return _even_shares(s, sources) if complete else []


def _fanout(s: State) -> int:
    return 0 if s.run_spec is None else s.run_spec.relay_fanout


def _left(s: State, root: Worker) -> bool:
    """It has left the mesh with the newest state: what it has sent stays."""
    at_newest = root.state_version == s.versions.version
    return at_newest and not s.fleet.in_mesh(root.worker_id, root.incarnation)


def _new_tree(s: State, sources: Sequence[Worker]) -> list[Wanted]:
    """A new tree of links for all receivers."""
    number = s.fleet.link_generation + 1
    tree = RelayTree(None, sources, _fanout(s))
    return [Wanted(tree.attach(w), w, tree=number) for w in s.fleet.living(Role.ROLLOUT)]


def _publishes_at_once(s: State, sources: Sequence[Worker]) -> bool:
    """True if a source that feeds nobody can send the newest version soon."""
    return s.steps.open is None or sources[0].ranks == 1


def _ready(s: State, sources: Sequence[Worker]) -> Sequence[Worker]:
    """Sources that can send the newest version soon, if there are any."""
    if _publishes_at_once(s, sources):
        return sources
    return [w for w in sources if s.fleet.sends_to(w.worker_id)] or sources


def _may_move(s: State, sources: Sequence[Worker], receiver: Worker) -> bool:
    """True if a source that feeds nobody could feed the receiver without a wait for weights."""
    return _publishes_at_once(s, sources) or receiver.loaded_version == s.versions.version


def _even_shares(s: State, sources: Sequence[Worker]) -> list[Wanted]:
    """Without relays: none sends to more than its share. Those with the oldest links move: a link
    that broke is not given back to the source that it came from."""
    fleet = s.fleet
    share = -(-len(fleet.links) // len(sources))
    over = [w for w in sources if fleet.sends_to(w.worker_id) > share]
    if not over:
        return []
    tree = RelayTree(fleet, sources, 0)
    return [
        Wanted(tree.attach(receiver), receiver)
        for source in over
        for receiver in islice(
            (w for w in fleet.receivers_of(source) if _may_move(s, sources, w)),
            fleet.sends_to(source.worker_id) - share,
        )
    ]


def _better_tree(s: State, sources: Sequence[Worker], *, complete: bool) -> list[Wanted]:
    """One improvement of the trees, if they need one. ``complete``: no source is about to come."""
    sends = [s.fleet.sends_to(w.worker_id) for w in sources]
    most = max(sends)
    if most > _fanout(s):
        return _relieved(s, sources, sources[sends.index(most)])
    feeding = len(sources) - sends.count(0)
    if complete and feeding < len(sources) and len(s.fleet.links) > feeding:
        receiver = subtree_to_hand_over(s.fleet, sources)
        if receiver is not None and _may_move(s, sources, receiver):
            return [Wanted(sources[sends.index(0)], receiver)]
    return []


def _relieved(s: State, sources: Sequence[Worker], root: Worker) -> list[Wanted]:
    """The replica sends to more than its share: the newest of its receivers that has followed it
    moves below a relay that has room."""
    newest = s.versions.version
    following = (w for w in s.fleet.receivers_of(root)[::-1] if newest - w.loaded_version <= 1)
    receiver = next(following, None)
    if receiver is None:
        return []
    tree = RelayTree(s.fleet, sources, _fanout(s), without=receiver.worker_id)
    parent = tree.parent_of(receiver)
    return [] if parent is root else [Wanted(parent, receiver)]


@of_worker
def break_link(d: Decider, now: float, worker: Worker, generation: int) -> None:
    """An end reports a failed weights link: its receiver gets another one."""
    s, fleet = d.state, d.state.fleet
    link = next((x for x in fleet.links.values() if x.generation == generation), None)
    if link is None or worker.worker_id not in (link.publisher, link.receiver):
        return
    sources = fleet.sources(s.versions.version)
    receiver = fleet.current(link.receiver, link.receiver_incarnation)
    if not sources or receiver is None:
        return
    # The network between these two may be at fault.
    ready = _ready(s, sources)
    others = [w for w in ready if w.worker_id != link.publisher] or ready
    sender = fleet.current(link.publisher, link.publisher_incarnation)
    relayed = sender is not None and sender.role is Role.ROLLOUT
    blamed = link.publisher if relayed and worker.worker_id == link.receiver else ""
    _assign(d, [Wanted(RelayTree(fleet, others, 0).least_root(), receiver, blames=blamed)])


def renew_link(d: Decider, receiver: Worker) -> None:
    """The receiver has a version that was never committed, and so may have what hangs on it."""
    s = d.state
    sources = s.fleet.sources(s.versions.version)
    if not sources:
        return
    if not _fanout(s):
        _assign(d, _renewed(s, sources, [receiver]))
    # Only a new term can have lost a commit: a tree that was planted in it at the present version
    # has new links for all.
    elif s.fleet.tree_planted != (s.term, s.versions.version):
        _assign(d, _new_tree(s, sources))


def take_back(d: Decider, receivers: Iterable[str]) -> None:
    """Sends the newest version, which was withdrawn, again to these receivers over new links."""
    s = d.state
    sources = s.fleet.sources(s.versions.version)
    if sources and _fanout(s):
        _assign(d, _new_tree(s, sources))
    elif sources:
        _assign(d, _renewed(s, sources, [s.fleet.workers[name] for name in receivers]))


def _renewed(s: State, sources: Sequence[Worker], receivers: Iterable[Worker]) -> list[Wanted]:
    """New links for the receivers, from the source that each has if that still is one."""
    tree, serving = RelayTree(s.fleet, sources, 0), {w.worker_id: w for w in sources}
    wanted = []
    for receiver in receivers:
        link = s.fleet.links.get(receiver.worker_id)
        present = None if link is None else serving.get(link.publisher)
        wanted.append(Wanted(present or tree.attach(receiver), receiver))
    return wanted


def _assign(d: Decider, wanted: Iterable[Wanted]) -> None:
    s = d.state
    for link in wanted:
        generation, tree = s.fleet.link_generation + 1, link.tree
        if tree is None:
            # The first link of a run plants the first tree.
            tree = (s.fleet.tree or generation) if _fanout(s) else 0
        d.emit(
            ev.LinkAssigned(
                generation=generation,
                publisher=link.publisher.worker_id,
                publisher_incarnation=link.publisher.incarnation,
                receiver=link.receiver.worker_id,
                receiver_incarnation=link.receiver.incarnation,
                reload=link.receiver.withdrawn_version >= s.versions.version,
                tree=tree,
                blames=link.blames,
            )
        )
