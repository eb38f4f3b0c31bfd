"""Diagnosis of rollout workers that get new weights and cannot load them."""

from __future__ import annotations

from controller.diagnosis.diagnosis import Diagnosis, Urgency
from controller.diagnosis.evidence import Evidence
from controller.diagnosis.silent_workers import culprit_of
from controller.ledger.enums import Role

_MEMORY = "out of memory"


def loads(e: Evidence) -> Diagnosis | None:
    """The worker that failed most often, of those that have loaded nothing since."""
    workers = e.state.fleet.living(Role.ROLLOUT)
    failing = [w for w in workers if w.load_trouble and e.of(w.worker_id) is not None]
    if not failing:
        return None
    worst = max(failing, key=lambda worker: worker.load_failures)
    found = e.of(worst.worker_id)
    assert found is not None
    others = len(failing) - 1
    remedy = f"See its log: paceline logs --run-dir DIR {worst.worker_id}"
    if _MEMORY in worst.load_trouble:
        remedy = (
            "Give its host or GPU more memory, or let its engine take less of it: paceline plan memory shows what each "
            "part needs"
        )
    times = "once" if worst.load_failures == 1 else f"{worst.load_failures} times"
    also = f", like {others} more" if others else ""
    return Diagnosis(
        "the run",
        culprit_of(found),
        because=f"which got weights and failed {times} to load them{also} ({worst.load_trouble})",
        next="it gets them again over another link, and ends after 3 failures in a row",
        remedy=remedy,
        severity=Urgency.STUCK if len(failing) == len(workers) else Urgency.SLOW,
    )
