"""Decisions about hosts: one that is blamed for several faults gets no new work.

- Its workers stay in the fleet and finish what they hold. They lease nothing, get no seat, and
  leave the mesh after the open step.
- The leader never blocks the only host that can do a role, nor more than a quarter of the hosts: a
  fault that hits all of them is no host's fault.
- A host that was blocked for a fault that turns out not to be its own is let in again.
- A blocked host works again while no other can do the role of a worker of it: see Fleet.shuns.
"""

from controller.ledger import events as ev
from controller.ledger.decisions.commands import CommandRefused, Decider, by_request
from controller.ledger.state.state import State
from paceline.errors import RefusalCode, plural

FAULTS = 3
WINDOW_S = 86_400
SHARE = 4
"""At most one host in so many is blocked for its faults, and one of a few."""


def settle_hosts(d: Decider, now: float) -> None:
    s = d.state
    limit, window_s = s.bounds.get("host_faults", FAULTS), fault_window_s(s)
    if s.ended or not limit:
        return
    for name, host in s.fleet.hosts.by_name.items():
        faults = host.incidents(now - window_s) if len(host.faults) >= limit else 0
        if host.excused and faults < limit:
            d.emit(ev.HostAllowed("", name))
        if host.blocked or faults < limit:
            continue
        why = f"{plural(faults, 'fault')} within {window_s / 3600:g} h"
        if not (problem := _needed(s, name) or _too_many(s)):
            d.emit(ev.HostBlocked("", name, why))
        elif not host.kept and len(_hosts(s)) > 1:
            d.emit(ev.HostKept(name, f"{why}, and still gets work: {problem}"))


def fault_window_s(s: State) -> int:
    """Seconds after which a fault does not count any more."""
    return s.bounds.get("host_window_s", WINDOW_S)


def _block(d: Decider, now: float, request_id: str, host: str, why: str = "") -> None:
    _check_known(d.state, host)
    if problem := _needed(d.state, host):
        raise CommandRefused(RefusalCode.INVALID, f"{host} is needed: {problem}")
    d.emit(ev.HostBlocked(request_id, host, why or "by request"))


def _allow(d: Decider, now: float, request_id: str, host: str) -> None:
    _check_known(d.state, host)
    d.emit(ev.HostAllowed(request_id, host))


block_host = by_request(_block)
allow_host = by_request(_allow)


def _hosts(s: State) -> set[str]:
    return {worker.host for worker in s.fleet.workers.values()}


def _check_known(s: State, host: str) -> None:
    known = _hosts(s) | s.fleet.hosts.by_name.keys()
    if host not in known:
        names = ", ".join(sorted(known)[:10]) or "none yet"
        raise CommandRefused(RefusalCode.UNKNOWN, f"no worker was on host {host!r}: {names}")


def _needed(s: State, host: str) -> str:
    """Reason why the run cannot do without the host; empty if it can."""
    workers = s.fleet.workers.values()
    pools = {w.pool for w in workers if w.host == host} or s.desired.keys()
    others = {
        w.pool
        for w in workers
        if w.joinable and not s.fleet.hosts.blocks(w.host) and w.host != host
    }
    missing = sorted(pools - others)
    return f"no other host has a {missing[0]} worker at work" if missing else ""


def _too_many(s: State) -> str:
    # A host that was replaced stays blocked, and is none of those that there are.
    blocked = sum(map(s.fleet.hosts.blocks, _hosts(s)))
    living = {w.host for w in s.fleet.workers.values() if w.alive}
    enough = blocked >= max(1, len(living) // SHARE)
    return f"{plural(blocked, 'host')} of {len(living)} blocked already" * enough
