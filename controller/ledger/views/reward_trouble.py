"""Trouble of the training reward: evaluation sets that say it is exploited."""

from controller.ledger.events.reward_hacking import hacking_in_words
from controller.ledger.state.state import State
from paceline.evaluation.reward_hacking import Exploited, exploited


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
