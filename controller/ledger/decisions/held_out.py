"""Decisions about evaluations: their rounds, and what follows from the metric that ranks them, or
from the held-out loss of recorded data: the best checkpoint, early stopping. Only an evaluation of
a checkpoint's own step says how good that checkpoint is. A step that is trained again after a
rollback trains the same groups, and keeps its score. A score of weights that the other replicas
outvoted is dropped, and that step is not evaluated again."""

from collections.abc import Mapping

from controller.ledger import events as ev
from controller.ledger.decisions.commands import Decider, of_worker
from controller.ledger.enums import Phase
from controller.ledger.specs import SetResult
from controller.ledger.state.evals import EvalRound
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from controller.ledger.state.versions import Checkpoint
from paceline.errors import plural
from paceline.evaluation import SetScores
from paceline.ids import Step, Version


def settle_evals(d: Decider) -> None:
    """Schedules the rounds that are due; closes those that are complete."""
    s = d.state
    if s.ended:
        return
    run, step = s.run, s.versions.step
    new = step not in s.evals.rounds and step not in s.evals.done
    if new and s.phase is Phase.OPEN:
        last = step >= run.steps
        due = tuple(e for e in run.evaluations if last or step % (e.every or run.eval_every) == 0)
        if due:
            rows = sum(eval_set.rows for eval_set in due)
            d.emit(ev.EvalScheduled(step, s.versions.version_of(step), rows, due))
    for round_ in list(s.evals.rounds.values()):
        version = s.versions.version_of(round_.step)
        if run.recorded and round_.step < step:
            # The state of this round is no more. The replica measured it before its vote, but a
            # failover of Redis lost the record: the end of the run would wait for it.
            _record(d, ev.EvalRecorded(round_.step, version, None, 0, round_.rows))
        elif round_.open == 0:
            _record(d, _sampled(s, round_, version))
    _settle_best(d)


def _sampled(s: State, round_: EvalRound, asked: Version) -> ev.EvalRecorded:
    """The scores of the version that most rows were sampled with."""
    version = round_.most_scored
    counted = {} if version is None else round_.scores[version].sets
    results = []
    for eval_set in round_.sets:
        scores = counted.get(eval_set.name, SetScores())
        # A mean over few rows may be high by chance, and would be the best score of the run.
        metrics = scores.metrics() if 2 * scores.rows > eval_set.rows else {}
        scored = round_.scored(eval_set.name)
        counts = scores.rows, scored - scores.rows
        failed = eval_set.rows - scored
        results.append(SetResult(eval_set.name, *counts, metrics, failed))
    name, metric = s.run.judging
    judging = next((each for each in results if each.name == name), SetResult(name, 0, 0, {}))
    return ev.EvalRecorded(
        round_.step,
        asked if version is None else version,
        judging.metrics.get("reward"),
        judging.count,
        judging.left_out,
        metric=f"{name}/{metric}",
        score=judging.metrics.get(metric),
        sets=tuple(results),
    )


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
    loss, means = measured.get("loss"), dict(measured)
    _record(d, ev.EvalRecorded(step, version, None, rows, left_out, loss=loss, measured=means))
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


def _record(d: Decider, evaluation: ev.EvalRecorded) -> None:
    """Ends the round; stops the run early if none of the newest rounds was the best."""
    d.emit(evaluation)
    s, evals, patience = d.state, d.state.evals, d.state.run.early_stop_evals
    ranked = evaluation.ranking is not None
    if ranked and 0 < patience <= evals.since_best and s.phase is Phase.OPEN:
        best, score = evals.best, evals.scores[evals.best]
        moved, shown = f"{s.run.best_metric or 'the held-out reward'} has not risen", f"{score:.3f}"
        if s.run.recorded:
            moved, shown = "the held-out loss has not fallen", f"{-score:.4f}"
        why = f"early stopping: {moved} for {plural(evals.since_best, 'evaluation')}; "
        d.emit(ev.StopRequested("early-stopping", f"{why}the best was {shown} after step {best}"))


def _settle_best(d: Decider) -> None:
    """Chooses the best checkpoint of those whose step was evaluated, the first of equals."""
    s = d.state
    scored = [c for c in s.versions.checkpoints if c.step in s.evals.scores]
    best = max(scored, key=lambda c: (s.evals.scores[c.step], -c.step), default=None)
    if best is not None and best.step != s.versions.best:
        chosen = best.step, best.path, s.evals.scores[best.step]
        d.emit(ev.BestCheckpointChosen(*chosen, s.run.recorded, s.run.best_metric))


def spared(s: State) -> list[Checkpoint]:
    """Checkpoints that always stay: the best, and those that may be better."""
    return [
        c for c in s.versions.checkpoints if c.step == s.versions.best or c.step in s.evals.rounds
    ]
