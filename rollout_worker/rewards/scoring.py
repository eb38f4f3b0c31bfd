"""Scorer of groups: in processes that may hang or die without harm to the worker.

    score(job) ──► least loaded process with room ──► scores
                        │ ended or hung
                        ├─ during this job's call ──► reward_crashed | reward_timeout
                        ├─ during another job's ────► scored again in the pool
                        └─ unknown ─────────────────► scored again in its own process

A lost process is replaced at once. A job is never blamed for another job's crash.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum

from paceline.config.sections.inputs import RewardConfig
from paceline.config.sections.scorers import named_scorer
from paceline.payloads.group_limits import usable_reward
from paceline.user_code.process import UserProcessPool
from rollout_worker.rewards.functions import (
    Components,
    Job,
    Reward,
    RewardError,
    ScoringFailed,
    Values,
    load,
    score,
)
from rollout_worker.rewards.process import ProcessLost, ScoringProcess

_DEPTH = 2  # Jobs in a process whose functions do not wait: one running, one queued
_DEPTH_WAITING = 128  # Jobs in a process whose functions only wait (for a sandbox, a judge)


@dataclass(frozen=True, slots=True)
class Scores:
    """``rewards``: weighted sum for each completion; ``components``: unweighted values, by name;
    ``seconds``: time in reward functions."""

    rewards: list[float]
    components: Components
    seconds: float
    placed: list[list[float]] = field(default_factory=list)
    """Parts of each completion's reward by turn or token, in order; empty: none."""


class Scorer:
    """With ``reward.processes`` = 0, functions run in the worker; only coroutines have a limit."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._in_worker: list[Reward] = []
        local = any(named_scorer(name) is None for name in config.functions)
        self._pool = UserProcessPool(self._new, config.processes if local else 0)
        self._depth = _DEPTH
        self._weights: list[tuple[str, float]] = []

    @property
    def capacity(self) -> int:
        """Groups that can be scored at once; 0: any number, because the functions only wait."""
        if self._pool.processes:
            return len(self._pool.processes) * (1 if self._depth == _DEPTH else _DEPTH_WAITING)
        return 0 if all(reward.waits for reward in self._in_worker) else 1

    async def start(self) -> None:
        """Imports the functions, in every process. Raises RewardError with one line."""
        if not self._pool.processes:
            self._in_worker = load(self._config.functions)
            self._weights = [(r.component, r.weight) for r in self._in_worker]
            return
        await self._pool.start()
        first = self._pool.processes[0]
        self._weights = first.components
        self._depth = _DEPTH_WAITING if first.waits else _DEPTH

    async def score(self, job: Job) -> Scores:
        """Raises ScoringFailed; never makes up a reward."""
        if self._pool.processes:
            values, seconds = await self._score_in_pool(job)
        else:
            started, limit_s = time.monotonic(), job.timeout_s or self._config.timeout_s
            values = await score(self._in_worker, job, timeout_s=limit_s)
            seconds = time.monotonic() - started
        components = [
            {name: fsum(v) if isinstance(v, list) else v for name, v in each.items()}
            for each in values
        ]
        rewards = [sum(w * each[name] for name, w in self._weights) for each in components]
        placed = [_placed(each, self._weights) for each in values]
        # Finite components may still overflow when weighted.
        if not all(map(usable_reward, [*rewards, *(p for each in placed for p in each)])):
            raise ScoringFailed(
                "reward_error", "the weighted sum of the rewards is not finite or above 1e9"
            )
        return Scores(rewards, components, seconds, placed)

    async def close(self) -> None:
        await self._pool.close()

    # ---- the pool

    async def _score_in_pool(self, job: Job) -> tuple[Values, float]:
        """Components for each completion, and seconds spent on them. Raises ScoringFailed."""
        while True:
            process = await self._pool.with_room(self._depth)
            try:
                return await process.run(job)
            except ProcessLost as lost:
                if lost.guilty:
                    raise
                if lost.guilty is None:
                    break
        # In a process of its own.
        process = self._pool.new()
        try:
            await process.start()
            return await process.run(job)
        except RewardError as error:
            raise ScoringFailed("reward_crashed", str(error)) from None
        finally:
            await process.close()

    def _new(self, freed: Callable[[ScoringProcess], None]) -> ScoringProcess:
        return ScoringProcess(self._config.functions, self._config.timeout_s, freed)


def _placed(
    values: dict[str, float | list[float]], weights: Sequence[tuple[str, float]]
) -> list[float]:
    """Weighted sum of the lists of one completion, place by place."""
    lists = [(weight, v) for name, weight in weights if isinstance(v := values[name], list)]
    return [fsum(at) for at in zip(*([w * one for one in v] for w, v in lists), strict=True)]


COMPONENT = "overlong"


def penalised(scores: Scores, tokens: Sequence[int], limit: int, config: RewardConfig) -> Scores:
    """``tokens``: of each completion; ``limit``: the most. The penalty is a component."""
    # From 0 up to the buffer to -1 at the limit.
    buffer = config.overlong_buffer
    shares = [max(-1.0, min(0.0, (limit - buffer - n) / buffer)) for n in tokens]
    losses = [config.overlong_penalty * share for share in shares]
    return replace(
        scores,
        rewards=[reward + loss for reward, loss in zip(scores.rewards, losses, strict=True)],
        components=[
            {**values, COMPONENT: loss}
            for values, loss in zip(scores.components, losses, strict=True)
        ],
    )
