"""The scorer interface: completions in, a number for each or numbers for each token out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config.schema import Config
from paceline.errors import BadInput

Tokens = NDArray[np.int32]
Score = float | NDArray[np.float32]
"""A number, or one for each token of the completion."""


class ScorerError(BadInput):
    """A scorer cannot be used. The message names the setting and the remedy."""


class BadCompletion(Exception):
    """The completion can never be scored. The message says why."""


class NoScore(Exception):
    """The model's answer is no score. The message says what it was."""


class Unavailable(Exception):
    """What the scorer asks does not answer. Another scorer, or a later request, may have more luck."""


@dataclass(frozen=True, slots=True)
class Item:
    """One completion, with its prompt."""

    prompt_tokens: Tokens
    tokens: Tokens
    """At least one."""
    prompt: str = ""
    text: str = ""
    answer: str = ""

    def __len__(self) -> int:
        return len(self.prompt_tokens) + len(self.tokens)


class CompletionScorer(ABC):
    """A pure function: equal items have equal scores, but for the sampling of a judge's reply."""

    done: int = 0
    """Rises with progress: batches, or replies of a judge."""
    computing: bool = False
    """A model of this process computes: without progress it hangs."""

    async def start(self) -> None:  # noqa: B027  (optional)
        """Loads the model. Raises ScorerError."""

    @abstractmethod
    async def score(self, items: Sequence[Item]) -> list[Score]:
        """In the order of ``items``. Raises BadCompletion, NoScore or Unavailable."""

    async def close(self) -> None:  # noqa: B027  (optional)
        """Ends what ``start`` began."""


def make_scorer(config: Config, name: str) -> CompletionScorer:
    """Raises ScorerError. Imports only what the kind needs."""
    known = config.scorers.by_name
    if name not in known:
        raise ScorerError(
            f"--scorer {name}: the config has no section [scorers.{name}] ({', '.join(known) or 'none'})"
        )
    match known[name].kind:
        case "reward_model":
            from scorer_worker.model_scorers import RewardModelScorer

            return RewardModelScorer(config, name)
        case "logprobs":
            from scorer_worker.model_scorers import TokenLogprobs

            return TokenLogprobs(config, name)
        case "judge" if known[name].url is not None:
            from scorer_worker.url_judge import UrlJudge

            return UrlJudge(config, name)
        case "judge":
            from scorer_worker.local_judge import LocalJudge

            return LocalJudge(config, name)
