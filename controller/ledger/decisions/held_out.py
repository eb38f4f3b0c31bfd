"""Decisions that follow from evaluations, by the metric that ranks them, or by the held-out loss of
recorded data: the best checkpoint, early stopping. Only an evaluation of a
checkpoint's own step says how good that checkpoint is. A step that is trained again after a
rollback trains the same groups, and keeps its score. A score of weights that the other replicas
outvoted is dropped, and that step is not evaluated again."""

from collections.abc import Mapping

from controller.ledger import events as ev
from controller.ledger.decisions.commands import Decider, of_worker
from controller.ledger.enums import Phase
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from controller.ledger.state.versions import Checkpoint
from paceline.ids import Step, Version

EARLY_STOP = "early-stopping"  # Request id of the stop


@of_worker
def record_held_out(
    d: Decider,
    now: float,
    worker: Worker,
    step: Step,
    version: Version,
    measured: Mapping[str, float],
    rows: int,
    left_out: int,
) -> None:
    """Takes what a replica measured on the state that the open round of its step is about.
    ``measured``: means over the rows, the loss among them unless no row could be measured."""
    # A repeated request, or one about a state that was rolled back since, changes nothing.
    if due_for(d.state, worker.worker_id, worker.incarnation, version) != step:
        return
    loss = measured.get("loss")
    recorded = ev.EvalRecorded(
        step, version, None, rows, left_out, loss=loss, measured=dict(measured)
    )
    record(d, recorded)
    d.settle_fleet(now)


def due_for(s: State, worker_id: str, incarnation: int, version: Version) -> Step | None:
    """The step whose held-out rows this replica is to measure with its state of ``version``; None:
    no step's. Rank 0 of the mesh does it before its next vote, so that the state is still there. If
    it dies, the next one does."""
    mesh, step = s.fleet.whole_mesh, s.versions.step
    if s.run_spec is None or not s.run.recorded or s.ended or step not in s.evals.rounds:
        return None
    if mesh is None or mesh.rank(worker_id, incarnation) != 0 or version != s.versions.version:
        return None
    return step


def record(d: Decider, evaluation: ev.EvalRecorded) -> None:
    """Ends the round; stops the run early if none of the newest rounds was the best."""
    d.emit(evaluation)
    s, evals, patience = d.state, d.state.evals, d.state.run.early_stop_evals
    ranked = patience and evaluation.ranking is not None
    if ranked and evals.since_best >= patience and s.phase is Phase.OPEN:
        best = evals.scores[evals.best]
        moved, shown = f"{s.run.best_metric or 'the held-out reward'} has not risen", f"{best:.3f}"
        if s.run.recorded:
            moved, shown = "the held-out loss has not fallen", f"{-best:.4f}"
        why = (
            f"early stopping: {moved} for {evals.since_best} evaluations; "
            f"the best was {shown} after step {evals.best}"
        )
        d.emit(ev.StopRequested(EARLY_STOP, why))


def settle_best(d: Decider) -> None:
    """Chooses the best checkpoint of those whose step was evaluated, the first of equals."""
    s = d.state
    scored = [c for c in s.versions.checkpoints if c.step in s.evals.scores]
    if not scored:
        return
    best = max(scored, key=lambda c: (s.evals.scores[c.step], -c.step))
    if best.step != s.versions.best:
        score, metric = s.evals.scores[best.step], s.run.best_metric
        chosen = (best.step, best.path, score)
        d.emit(ev.BestCheckpointChosen(*chosen, is_loss=s.run.recorded, metric=metric))


def spared(s: State) -> list[Checkpoint]:
    """Checkpoints that always stay: the best, and those that may be better."""
    return [
        c for c in s.versions.checkpoints if c.step == s.versions.best or c.step in s.evals.rounds
    ]
