"""Scores of a group by the scorers of the configuration: rewards, and columns of log-probs."""

import asyncio
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config.schema import Config
from paceline.config.sections.scorers import PREFIX, named_scorer
from paceline.payloads.group_limits import usable_reward
from paceline.v1 import scorer_pb2
from rollout_worker.generated_group import GeneratedGroup, token_bytes
from rollout_worker.rewards.functions import weights_of
from rollout_worker.rewards.scoring import Scores
from rollout_worker.tasks.score_call import LivingScorers, ScorerFailed, scored

REQUEST_BYTES = 4 << 20
"""Approximate size of a request; several scorers share a group of long completions."""


Functions = Sequence[str] | Mapping[str, float]  # Name of the scorer in reward.functions


class GroupScores:
    """Asks the scorers that reward.functions names, and those of kind logprobs."""

    def __init__(self, config: Config, run_dir: Path | None = None) -> None:
        """Raises AuthError."""
        self._config = config
        self._columns = [n for n, s in config.scorers.by_name.items() if s.kind == "logprobs"]
        self._living = LivingScorers(config, run_dir)
        self.directed = self._living.set
        self.close = self._living.close

    async def rewards(
        self, made: GeneratedGroup, answer: Any, scores: Scores, functions: Functions
    ) -> Scores:
        """``scores`` with those of the scorers among ``functions``. Raises ScorerFailed."""
        named = {named_scorer(name): weight for name, weight in weights_of(functions).items()}
        weights = {name: weight for name, weight in named.items() if name is not None}
        if not weights:
            return scores
        names, began = list(weights), time.monotonic()
        replies = await _together([self._numbers(name, made, answer) for name in names])
        totals, components = list(scores.rewards), [dict(c) for c in scores.components]
        for name, numbers in zip(names, replies, strict=True):
            for index, number in enumerate(numbers):
                components[index][PREFIX + name] = number
                totals[index] += weights[name] * number
        if not all(map(usable_reward, totals)):
            raise ScorerFailed(
                "scorer_error", "the weighted sum of the rewards is not finite or above 1e9"
            )
        seconds = scores.seconds + time.monotonic() - began
        return replace(scores, rewards=totals, components=components, seconds=seconds)

    async def columns(self, made: GeneratedGroup, answer: Any) -> Mapping[str, list[bytes]]:
        """By scorer: the bytes of each completion's column. Raises ScorerFailed."""
        found = await _together([self._tokens(name, made, answer) for name in self._columns])
        return dict(zip(self._columns, found, strict=True))

    async def _numbers(self, name: str, made: GeneratedGroup, answer: Any) -> list[float]:
        found: list[float] = []
        for count, reply in await self._replies(name, made, answer):
            if len(reply.scores) != count:
                raise _bad(name, f"returned {len(reply.scores)} scores for {count} completions")
            found += reply.scores
        for number in found:
            if not usable_reward(number):
                raise _bad(name, f"returned the score {number}")
        return found

    async def _tokens(self, name: str, made: GeneratedGroup, answer: Any) -> list[bytes]:
        found: list[bytes] = []
        for count, reply in await self._replies(name, made, answer):
            if len(reply.columns) != count:
                raise _bad(name, f"returned {len(reply.columns)} columns for {count} completions")
            found += reply.columns
        for completion, column in zip(made.completions, found, strict=True):
            tokens = len(completion.tokens)
            if len(column) != 4 * tokens:
                raise _bad(name, f"returned {len(column) / 4:g} numbers for {tokens} tokens")
            if not np.isfinite(np.frombuffer(column, "<f4")).all():
                raise _bad(name, "returned log-probs that are not finite")
        return found

    async def _replies(
        self, name: str, made: GeneratedGroup, answer: Any
    ) -> list[tuple[int, scorer_pb2.ScoreReply]]:
        requests = list(self._requests(name, made, answer))
        timeout_s = self._config.scorers.by_name[name].timeout_s
        replies = await _together([scored(self._living, name, r, timeout_s) for r in requests])
        return [(len(q.completions), r) for q, r in zip(requests, replies, strict=True)]

    def _requests(
        self, name: str, made: GeneratedGroup, answer: Any
    ) -> Iterable[scorer_pb2.ScoreRequest]:
        def request() -> scorer_pb2.ScoreRequest:
            return scorer_pb2.ScoreRequest(
                run=self._config.run.name,
                scorer=name,
                prompt_tokens=token_bytes(made.prompt.tokens),
                prompt=made.prompt.text,
                answer_json="" if answer is None else json.dumps(answer),
                completions=batch,
            )

        most = self._config.scorers.by_name[name].batch_size
        batch: list[scorer_pb2.ScoredCompletion] = []
        size = 0
        for completion, text in zip(made.completions, made.texts, strict=True):
            item = scorer_pb2.ScoredCompletion(tokens=token_bytes(completion.tokens), text=text)
            if batch and (len(batch) >= most or size + item.ByteSize() > REQUEST_BYTES):
                yield request()
                batch, size = [], 0
            batch.append(item)
            size += item.ByteSize()
        yield request()


def _bad(name: str, detail: str) -> ScorerFailed:
    return ScorerFailed("scorer_error", f"scorer {name} {detail}")


async def _together(coroutines: list[Any]) -> list[Any]:
    """Like asyncio.gather, but if one fails the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
