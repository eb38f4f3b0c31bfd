"""Decisions that follow from evaluations, by the metric that ranks them, or by the held-out loss of
recorded data: the best checkpoint, early stopping. Only an evaluation of a
checkpoint's own step says how good that checkpoint is. A step that is trained again after a
rollback trains the same groups, and keeps its score. A score of weights that the other replicas
outvoted is dropped, and that step is not evaluated again."""

from controller.ledger import commands as cmd
from controller.ledger import events as ev
from controller.ledger.decisions.decider import Decider, decides
from controller.ledger.enums import Phase
from controller.ledger.state.state import State
from controller.ledger.state.versions import Checkpoint
from controller.ledger.views.views import due_for

EARLY_STOP = "early-stopping"  # Request id of the stop


@decides
def record(d: Decider, c: cmd.RecordHeldOut, now: float) -> None:
    """Takes what a replica measured on the state that the open round of its step is about."""
    d.caller(c.worker_id, c.incarnation)
    s = d.state
    # A repeated request, or one about a state that was rolled back since, changes nothing.
    if due_for(s, c.worker_id, c.incarnation, c.version) != c.step:
        return
    recorded = ev.EvalRecorded(
        c.step, c.version, None, c.rows, c.left_out, loss=c.loss, measured=dict(c.measured)
    )
    d.emit(recorded)
    if recorded.ranking is not None:
        judge(d)
    d.settle_fleet(now)


def judge(d: Decider) -> None:
    """After an evaluation with a reward."""
    s = d.state
    evals, patience = s.evals, s.run.early_stop_evals
    best = evals.scores[evals.best]
    if patience and evals.since_best >= patience and s.phase is Phase.OPEN:
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
