"""The scorer of a section of the configuration, by its kind."""

from __future__ import annotations

from paceline.config.schema import Config
from scorer_worker.scorer import CompletionScorer, ScorerError


def make_scorer(config: Config, name: str) -> CompletionScorer:
    """Raises ScorerError. Imports only what the kind needs."""
    known = config.scorers.by_name
    if name not in known:
        raise ScorerError(
            f"--scorer {name}: the config has no section [scorers.{name}] ({', '.join(known) or 'none'})"
        )
    match known[name].kind:
        case "reward_model":
            from scorer_worker.reward_model import RewardModelScorer

            return RewardModelScorer(config, name)
        case "logprobs":
            from scorer_worker.logprobs import TokenLogprobs

            return TokenLogprobs(config, name)
        case "judge" if known[name].url is not None:
            from scorer_worker.url_judge import UrlJudge

            return UrlJudge(config, name)
        case "judge":
            from scorer_worker.local_judge import LocalJudge

            return LocalJudge(config, name)
