"""Words about a worker that does not report, or that takes long: where it stands, and what comes
next."""

from __future__ import annotations

from collections.abc import Iterable

from controller.diagnosis.diagnosis import Diagnosis, finding, seconds
from controller.diagnosis.evidence import Evidence, WorkerEvidence
from paceline.observe.vocabulary import Severity
from paceline.process.kernel_state import KernelState
from paceline.process.waits import Wait, WaitKind

_SHARED = (WaitKind.COLLECTIVE, WaitKind.VOTES, WaitKind.PEERS, WaitKind.STATE)
"""Waits in which a member may be because of another member."""


def quietest(e: Evidence, workers: Iterable[WorkerEvidence]) -> WorkerEvidence | None:
    """The worker that has been silent the longest; None: all report."""
    silent = [w for w in workers if e.silent(w) or w.suspect]
    return max(silent, key=lambda w: w.silent_s, default=None)


def silent_worker(
    e: Evidence,
    worker: WorkerEvidence,
    subject: str,
    *,
    peers: Iterable[WorkerEvidence] = (),
    then: str = "",
) -> Diagnosis:
    """``peers``: workers that wait for it, whose reports may say where it stands. ``then``: what
    its death leads to."""
    waited_s = [w.age_s for p in peers for w in p.waits if w.kind in _SHARED]
    left_s = worker.dead_in_s
    if worker.wedged_in_s is not None:
        left_s = min(left_s, worker.wedged_in_s)
    following = f"it is declared dead in {seconds(left_s)}" + (f", {then}" if then else "")
    remedy = (
        f"Look at what it does: paceline stacks {worker.worker_id}, "
        f"paceline logs {worker.worker_id}; check the network to {worker.host or 'its host'}"
    )
    if worker.kernel is not None and worker.kernel.stopped:
        remedy = f"Continue it: kill -CONT {worker.pid} on {worker.host}"
    since_s = max([*waited_s, worker.silent_s])
    because = _how(e, worker, peers)
    return Diagnosis(subject, worker.culprit, because, since_s, following, remedy, Severity.ERROR)


def at(what: str) -> str:
    return what if what.startswith("inside") else f"while {what}"


def _place(worker: WorkerEvidence, peers: Iterable[WorkerEvidence]) -> str:
    """Point at which it stands: "inside the all-reduce of epoch 9"."""
    if worker.waits:
        return at(worker.waits[0].what)
    # It came to the collective after its last report, or its peers would not be waiting in it.
    waits = (peer.waits_for(WaitKind.COLLECTIVE) for peer in peers)
    if (wait := next(filter(None, waits), None)) is not None:
        return at(wait.what)
    return f'at "{worker.activity}"' if worker.activity else ""


def _how(e: Evidence, worker: WorkerEvidence, peers: Iterable[WorkerEvidence]) -> str:
    place = _place(worker, peers)
    if (wait := e.stuck_loop(worker.worker_id)) is not None:
        return f"whose event loop has not run for {seconds(wait.age_s)}, {place}".rstrip(", ")
    if state := _by_kernel(worker.kernel):
        return f"{state} {place}".rstrip()
    lost = "its session broke" if worker.suspect else "silent"
    return f"{lost}, last report {seconds(worker.silent_s)} ago, {place}".rstrip(", ")


def _by_kernel(kernel: KernelState | None) -> str:
    if kernel is None:
        return ""
    return "stopped" if kernel.stopped else kernel.words if kernel.uninterruptible else ""


def slow_worker(
    e: Evidence, worker: WorkerEvidence, subject: str, wait: Wait | None, waited_s: float
) -> Diagnosis:
    """A worker that reports and that others wait for."""
    doing = wait.what if wait is not None else f'at "{worker.activity}"'
    still = f", without progress for {seconds(worker.still_s)}" if worker.still_s >= 1.0 else ""
    following = ""
    if wait is not None and wait.left_s is not None:
        following = f"it gives up in {seconds(wait.left_s)}"
    elif worker.wedged_in_s is not None:
        following = f"if it makes no progress it is declared dead in {seconds(worker.wedged_in_s)}"
    remedy, late = f"See what it does: paceline stacks {worker.worker_id}", waited_s > e.late_s
    return finding(subject, worker.culprit, doing + still, waited_s, following, remedy, late=late)
