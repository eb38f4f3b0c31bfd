"""Decisions about the weights links: one for every living rollout worker, from whom it receives.

Every replica of the mesh that holds the newest state is a source: their weights are equal in every
bit, so receivers are dealt out over them, and one that loses its source goes on with another's
buckets. With ``relay_fanout`` the links are trees below the sources:

- A receiver whose link from a relay breaks gets the next one from a source. Between two versions
  those that are too many for it move below relays again.
- A source that feeds nobody takes over a part of the trees. It has no copy of the weights to send,
  and one of several ranks makes it between two steps only: during a step it is given no receiver
  that waits for the newest version.
- With ``stores_weights`` one replica is the source of all links, and nobody connects over them: it
  writes to the store what the receivers read there. A receiver that cannot read it breaks its link.
- If a source loses its state, or a version is taken back, new trees are planted: a relay hands
  nothing on over its links that came over links of an earlier one, unless it is known to be
  committed.
"""

from collections.abc import Iterable, Sequence

from controller.ledger import events as ev
from controller.ledger.decisions.commands import Decider, of_worker
from controller.ledger.decisions.relay_tree import RelayTree, subtree_to_hand_over
from controller.ledger.enums import Role
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from paceline.ids import stored_version


def settle_links(d: Decider) -> None:
    """One link for every living rollout worker, if a replica holds the newest state; then those
    that spread the sending better. Those of recorded data load no weights."""
    s = d.state
    if s.over or s.run.recorded:
        return
    sources = _sources(s)
    if not sources:
        return
    _supply(d, sources)
    # Once the whole mesh has the state, and not for each member that comes to it.
    complete = len(sources) == len(s.fleet.members())
    if s.run.relay_fanout:
        _improve_tree(d, sources, complete=complete)
    elif complete:
        _even_shares(d, sources)


def _sources(s: State) -> Sequence[Worker]:
    sources = s.fleet.sources(s.versions.version)
    return sources[:1] if s.run.stores_weights else sources


def _supply(d: Decider, sources: Sequence[Worker]) -> None:
    """Links for the receivers that have none, or one from a replica without the newest state."""
    s, fleet = d.state, d.state.fleet
    serving = {w.worker_id for w in sources}
    failing = [w for w in fleet.roots() if w.worker_id not in serving]
    # One that has left the mesh with the newest state: what it has sent stays.
    left = [w for w in failing if w.state_version == s.versions.version and not fleet.in_mesh(w)]
    if s.run.relay_fanout and len(left) < len(failing):
        _plant(d, sources)
        return
    if not failing and len(fleet.links) >= fleet.count(Role.ROLLOUT):
        return
    without = {None, *(w.worker_id for w in failing)}
    publisher_of = {receiver: link.publisher for receiver, link in fleet.links.items()}
    tree = RelayTree(fleet, _ready(s, sources), s.run.relay_fanout)
    for receiver in fleet.living(Role.ROLLOUT):
        if publisher_of.get(receiver.worker_id) in without:
            _assign(d, tree.attach(receiver), receiver)


def _plant(d: Decider, sources: Sequence[Worker]) -> None:
    """A new tree of links for all receivers."""
    s = d.state
    number = s.fleet.link_generation + 1
    tree = RelayTree(None, sources, s.run.relay_fanout)
    for receiver in s.fleet.living(Role.ROLLOUT):
        _assign(d, tree.attach(receiver), receiver, tree=number)


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


def _even_shares(d: Decider, sources: Sequence[Worker]) -> None:
    """Without relays: none sends to more than its share. Those with the oldest links move: a link
    that broke is not given back to the source that it came from."""
    s, fleet = d.state, d.state.fleet
    share = -(-len(fleet.links) // len(sources))
    over = [w for w in sources if fleet.sends_to(w.worker_id) > share]
    if not over:
        return
    tree = RelayTree(fleet, sources, 0)
    for source in over:
        movable = [w for w in fleet.receivers_of(source) if _may_move(s, sources, w)]
        for receiver in movable[: fleet.sends_to(source.worker_id) - share]:
            _assign(d, tree.attach(receiver), receiver)


def _improve_tree(d: Decider, sources: Sequence[Worker], *, complete: bool) -> None:
    """One improvement of the trees, if they need one. ``complete``: no source is about to come."""
    s, newest = d.state, d.state.versions.version
    sends = [s.fleet.sends_to(w.worker_id) for w in sources]
    most = max(sends)
    if most > s.run.relay_fanout:
        # The newest of the receivers that have followed this source moves below a relay with room.
        source = sources[sends.index(most)]
        receivers = reversed(s.fleet.receivers_of(source))
        receiver = next((w for w in receivers if newest - w.loaded_version <= 1), None)
        if receiver is not None:
            tree = RelayTree(s.fleet, sources, s.run.relay_fanout, without=receiver.worker_id)
            if (parent := tree.parent_of(receiver)) is not source:
                _assign(d, parent, receiver)
        return
    feeding = len(sources) - sends.count(0)
    if complete and feeding < len(sources) and len(s.fleet.links) > feeding:
        receiver = subtree_to_hand_over(s.fleet, sources)
        if receiver is not None and _may_move(s, sources, receiver):
            _assign(d, sources[sends.index(0)], receiver)


@of_worker
def break_link(d: Decider, now: float, worker: Worker, generation: int) -> None:
    """An end reports a failed weights link: its receiver gets another one."""
    s, fleet = d.state, d.state.fleet
    link = next((x for x in fleet.links.values() if x.generation == generation), None)
    if link is None or worker.worker_id not in (link.publisher, link.receiver):
        return
    # A worker that can read nothing, for lack of memory or because its own is bad, is heard once
    # for each version: the others need not wait for it to be stored again and again.
    heard = stored_version(s.versions.unreadable) == stored_version(s.versions.stored)
    known = heard and worker.worker_id in s.versions.unreadable_by
    if worker.role is Role.ROLLOUT and s.versions.stored and not known:
        d.emit(ev.WeightsStored(s.versions.stored, worker.worker_id, readable=False))
    sources = _sources(s)
    if not sources:
        return
    # The network between these two may be at fault.
    ready = _ready(s, sources)
    others = [w for w in ready if w.worker_id != link.publisher] or ready
    sender, receiver = fleet.workers[link.publisher], fleet.workers[link.receiver]
    relayed = sender.role is Role.ROLLOUT and worker is receiver
    blamed = link.publisher if relayed else ""
    _assign(d, RelayTree(fleet, others, 0).least_root(), receiver, blames=blamed)


def send_again(d: Decider, receivers: Iterable[str], *, lost_commit: bool = False) -> None:
    """Sends the newest version over new links: it was withdrawn from these receivers, or they have
    a version that was never committed, and so may have what hangs on them."""
    s = d.state
    sources = _sources(s)
    if not sources:
        return
    if s.run.relay_fanout:
        # Only a new term can have lost a commit: a tree that was planted in it at the present
        # version has new links for all.
        if not lost_commit or s.fleet.tree_planted != (s.term, s.versions.version):
            _plant(d, sources)
        return
    tree, serving = RelayTree(s.fleet, sources, 0), {w.worker_id: w for w in sources}
    for name in receivers:
        receiver, link = s.fleet.workers[name], s.fleet.links.get(name)
        # From the source that it has, if that still is one.
        present = None if link is None else serving.get(link.publisher)
        _assign(d, present or tree.attach(receiver), receiver)


def note_stored(d: Decider, worker: Worker, name: str) -> None:
    """The replica that sends has written weights to the store. What it says may be older than what
    became of them: they were taken back, or could not be read."""
    versions, sends = d.state.versions, d.state.fleet.sends_to(worker.worker_id)
    committed = stored_version(versions.stored) <= stored_version(name) <= versions.version
    if sends and committed and name not in (versions.stored, versions.unreadable):
        d.emit(ev.WeightsStored(name, worker.worker_id))


def _assign(
    d: Decider, publisher: Worker, receiver: Worker, *, tree: int | None = None, blames: str = ""
) -> None:
    """``tree``: number of the new tree that the link belongs to; None: the present one. ``blames``:
    the relay from which the receiver's link before broke."""
    s = d.state
    generation = s.fleet.link_generation + 1
    if tree is None:
        # The first link of a run plants the first tree.
        tree = (s.fleet.tree or generation) if s.run.relay_fanout else 0
    reload = receiver.withdrawn_version >= s.versions.version
    d.emit(ev.LinkAssigned(generation, *publisher.who, *receiver.who, reload, tree, blames))
