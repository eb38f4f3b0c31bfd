"""Spare rollout workers: loaded and up to date, without leases until a worker is missing. The fleet
has ``rollout_spares`` more rollout workers than the desired count. Which of them work is a decision
of the ledger, so it survives a failover. A worker comes as a spare. While fewer work than desired,
a spare is put to work, first one that serves weights already. While more work than desired, the one
with the highest name stands by once it has finished its tasks."""

from controller.ledger.decisions.commands import Decider
from controller.ledger.enums import Lifecycle, Role
from controller.ledger.events import SpareSet
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State


def desired_spares(state: State) -> int:
    return state.bounds.get("rollout_spares", 0)


def missing_at_work(state: State) -> int:
    """Rollout workers that should be put to work; negative: that should stand by."""
    working, spares = len(state.fleet.at_work()), len(_spares(state))
    desired = state.desired.get("rollout", 0) if desired_spares(state) else working + spares
    return min(desired - working, spares)


def settle_spares(d: Decider) -> None:
    if d.state.ended:
        return
    missing = missing_at_work(d.state)
    if missing > 0:
        changed = sorted(_spares(d.state), key=_readiest)[:missing]
    else:
        last_first = sorted(d.state.fleet.at_work(), key=lambda w: w.worker_id, reverse=True)
        changed = last_first[:-missing] if missing else []
    for worker in changed:
        d.emit(SpareSet(*worker.who, not worker.spare))


def _spares(state: State) -> list[Worker]:
    return [w for w in state.fleet.living(Role.ROLLOUT) if w.spare and not w.leaving]


def _readiest(worker: Worker) -> tuple[bool, str]:
    warm = worker.lifecycle is Lifecycle.RUNNING and worker.loaded_version >= 0
    return not warm, worker.worker_id
