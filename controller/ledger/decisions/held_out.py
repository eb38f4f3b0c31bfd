"""Decisions that follow from held-out rewards: the best checkpoint, the warning, early stopping.

Only an evaluation of a checkpoint's own step says how good that checkpoint is. A step that is trained again after a
rollback trains the same groups, and keeps its score. A score of weights that the other replicas outvoted is dropped, and
that step is not evaluated again.
"""

from __future__ import annotations

from controller.ledger import events as ev
from controller.ledger.decisions.decider import Decider
from controller.ledger.enums import Phase
from controller.ledger.state.state import State
from controller.ledger.state.versions import Checkpoint

EARLY_STOP = "early-stopping"
"""Request id of the stop."""


def judge(d: Decider, *, had_fallen: bool) -> None:
    """After an evaluation with a reward. ``had_fallen``: the one before was far below the best."""
    s = d.state
    evals, patience = s.evals, s.run.early_stop_evals
    step = max(evals.scores)
    best = evals.scores[evals.best]
    if evals.fallen and not had_fallen:
        d.emit(ev.HeldOutFell(step, evals.scores[step], evals.best, best))
    if patience and evals.since_best >= patience and s.phase is Phase.OPEN:
        why = (
            f"early stopping: the held-out reward has not risen for {evals.since_best} evaluations; "
            f"the best was {best:.3f} after step {evals.best}"
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
        d.emit(ev.BestCheckpointChosen(best.step, best.path, s.evals.scores[best.step]))


def spared(s: State) -> list[Checkpoint]:
    """Checkpoints that stay however many newer ones there are: the best, and those that may be better."""
    return [
        c for c in s.versions.checkpoints if c.step == s.versions.best or c.step in s.evals.rounds
    ]
