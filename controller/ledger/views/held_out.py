"""Evaluation that is due in a run of recorded data, and who measures it."""

from controller.ledger.events.tasks import hacking_in_words
from controller.ledger.state.state import State
from paceline.evaluation.reward_hacking import Exploited, exploited
from paceline.ids import Step, Version


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


def exploited_by_set(state: State) -> dict[str, Exploited]:
    """By the name of the set that shows it, as of its newest evaluation."""
    found = {}
    for name, by_step in state.evals.checked.items():
        evaluations = [by_step[step] for step in sorted(by_step)]
        if (what := exploited(evaluations, state.run.eval_drop)) is not None:
            found[name] = what
    return found


def reward_trouble(state: State) -> str:
    """In a sentence, with the remedy; empty if there is none."""
    by_set = exploited_by_set(state)
    return "; ".join(hacking_in_words(f"{name}/reward", what) for name, what in by_set.items())
