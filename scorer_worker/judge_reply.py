"""The request to a judge about one completion, and the score in its reply."""

from __future__ import annotations

import re

from paceline.config.sections.scorers import ScorerConfig
from scorer_worker.scorer import Item, NoScore

SHOWN = 160
"""Characters of a reply in an error."""


def request_about(item: Item, config: ScorerConfig) -> str:
    return config.prompt.format(prompt=item.prompt, completion=item.text, answer=item.answer)


def score_in(reply: str, config: ScorerConfig) -> float:
    """The first group of the last match. Raises NoScore."""
    found = list(re.finditer(config.pattern, reply))
    shown = repr(reply[-SHOWN:])
    if not found or found[-1][1] is None:
        raise NoScore(f"the judge's reply has no score (pattern {config.pattern!r}): {shown}")
    try:
        score = float(found[-1][1])
    except ValueError:
        raise NoScore(f"the judge's score {found[-1][1]!r} is no number: {shown}") from None
    low, high = config.score_range
    if not low <= score <= high:
        raise NoScore(f"the judge's score {score:g} is not from {low:g} to {high:g}: {shown}")
    return score
