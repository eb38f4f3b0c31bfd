"""Words about a worker that does not report, or that takes long: where it stands, and what comes
next."""

from __future__ import annotations

from controller.diagnosis.diagnosis import Culprit, CulpritKind, Diagnosis, Urgency, seconds
from controller.diagnosis.evidence import Evidence, WorkerEvidence
from paceline.process.kernel_state import KernelState
from paceline.process.waits import Wait, WaitKind

_SHARED = (WaitKind.COLLECTIVE, WaitKind.VOTES, WaitKind.PEERS, WaitKind.STATE)
"""Waits in which a member may be because of another member."""


def culprit_of(worker: WorkerEvidence) -> Culprit:
    return Culprit(CulpritKind.WORKER, worker.worker_id, worker.host, worker.pid)


def quietest(evidence: Evidence, workers: list[WorkerEvidence]) -> WorkerEvidence | None:
    """The worker that has been silent the longest; None: all report."""
    silent = [w for w in workers if evidence.silent(w) or w.suspect]
    return max(silent, key=lambda w: w.silent_s, default=None)


def silent_worker(
    evidence: Evidence,
    worker: WorkerEvidence,
    subject: str,
    *,
    peers: list[WorkerEvidence] | None = None,
    then: str = "",
) -> Diagnosis:
    """``peers``: workers that wait for it, whose reports may say where it stands. ``then``: what
    its death leads to."""
    waited_s = max(
        [w.age_s for p in peers or [] for w in p.waits if w.kind in _SHARED], default=0.0
    )
    left_s = worker.dead_in_s
    if worker.wedged_in_s is not None:
        left_s = min(left_s, worker.wedged_in_s)
    following = f"it is declared dead in {seconds(left_s)}"
    return Diagnosis(
        subject,
        culprit_of(worker),
        because=_how(evidence, worker, peers or []),
        since_s=max(waited_s, worker.silent_s),
        next=f"{following}{', ' + then if then else ''}",
        remedy=remedy_of(worker),
        severity=Urgency.STUCK,
    )


def remedy_of(worker: WorkerEvidence) -> str:
    if worker.kernel is not None and worker.kernel.stopped:
        return f"Continue it: kill -CONT {worker.pid} on {worker.host}"
    return (
        f"Look at what it does: paceline stacks {worker.worker_id}, "
        f"paceline logs {worker.worker_id}; check the network to {worker.host or 'its host'}"
    )


def place(worker: WorkerEvidence, peers: list[WorkerEvidence]) -> str:
    """Where it stands: "inside the all-reduce of epoch 9", "while fetching 4 groups of step 5"."""
    if worker.waits:
        return at(worker.waits[0].what)
    # It came to the collective after its last report, or its peers would not be waiting in it.
    for peer in peers:
        if (wait := peer.waits_for(WaitKind.COLLECTIVE)) is not None:
            return at(wait.what)
    return f'at "{worker.activity}"' if worker.activity else ""


def at(what: str) -> str:
    return what if what.startswith("inside") else f"while {what}"


def _how(evidence: Evidence, worker: WorkerEvidence, peers: list[WorkerEvidence]) -> str:
    where = place(worker, peers)
    if (wait := evidence.stuck_loop(worker.worker_id)) is not None:
        return f"whose event loop has not run for {seconds(wait.age_s)}, {where}".rstrip(", ")
    state = _by_kernel(worker.kernel)
    if not state:
        lost = "its session broke" if worker.suspect else "silent"
        state = f"{lost}, last report {seconds(worker.silent_s)} ago"
        return f"{state}, {where}".rstrip(", ")
    return f"{state} {where}".rstrip()


def _by_kernel(kernel: KernelState | None) -> str:
    if kernel is None:
        return ""
    if kernel.stopped:
        return "stopped"
    return kernel.words if kernel.uninterruptible else ""


def slow_worker(
    evidence: Evidence, worker: WorkerEvidence, subject: str, wait: Wait | None, waited_s: float
) -> Diagnosis:
    """A worker that reports and that others wait for."""
    doing = wait.what if wait is not None else f'at "{worker.activity}"'
    still = f", without progress for {seconds(worker.still_s)}" if worker.still_s >= 1.0 else ""
    left_s = worker.wedged_in_s
    if wait is not None and wait.left_s is not None:
        following = f"it gives up in {seconds(wait.left_s)}"
    elif left_s is not None:
        following = f"if it makes no progress it is declared dead in {seconds(left_s)}"
    else:
        following = ""
    late = waited_s > evidence.late_s
    return Diagnosis(
        subject,
        culprit_of(worker),
        because=f"{doing}{still}",
        since_s=waited_s,
        next=following,
        remedy=f"See what it does: paceline stacks {worker.worker_id}" if late else "",
        severity=Urgency.SLOW if late else Urgency.OK,
    )
