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
    staying = _staying(state)
    desired = state.desired.get("rollout", 0) if desired_spares(state) else len(staying)
    missing = desired - sum(not w.spare for w in staying)
    return min(missing, sum(w.spare for w in staying))


def settle_spares(d: Decider) -> None:
    if d.state.ended:
        return
    missing = missing_at_work(d.state)
    if not missing:
        return
    spares = sorted((w for w in _staying(d.state) if w.spare), key=_readiest)
    working = [w for w in _staying(d.state) if not w.spare]
    working.sort(key=lambda w: w.worker_id, reverse=True)
    for worker in [*spares[: max(0, missing)], *working[: max(0, -missing)]]:
        d.emit(SpareSet(*worker.who, not worker.spare))


def _staying(state: State) -> list[Worker]:
    return [w for w in state.fleet.living(Role.ROLLOUT) if not w.leaving]


def _readiest(worker: Worker) -> tuple[bool, str]:
    warm = worker.lifecycle is Lifecycle.RUNNING and worker.loaded_version >= 0
    return not warm, worker.worker_id
