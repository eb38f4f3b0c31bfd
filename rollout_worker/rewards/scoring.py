"""Scorer of groups: in a pool of processes, or without a pool in the worker itself."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from paceline.config.schema import RewardConfig
from paceline.rpc.wire_limits import usable_reward
from rollout_worker.rewards.functions import Reward, load
from rollout_worker.rewards.pool import ScoringPool
from rollout_worker.rewards.score import Components, Job, ScoringFailed, score


@dataclass(frozen=True, slots=True)
class Scores:
    """``rewards``: weighted sum for each completion; ``components``: unweighted values, by name;
    ``seconds``: time in reward functions."""

    rewards: list[float]
    components: Components
    seconds: float


class Scorer:
    """With ``reward.processes`` = 0, functions are called in the worker, and those that do not wait
    have no time limit. Otherwise they run in a ScoringPool."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._pool: ScoringPool | None = None
        self._inline: list[Reward] = []
        self._weights: list[tuple[str, float]] = []

    async def start(self) -> None:
        """Imports the functions. Raises RewardError with one line."""
        if self._config.processes == 0:
            self._inline = load(self._config.functions)
            self._weights = [(r.component, r.weight) for r in self._inline]
            return
        self._pool = ScoringPool(
            self._config.functions,
            processes=self._config.processes,
            timeout_s=self._config.timeout_s,
        )
        await self._pool.start()
        self._weights = self._pool.components

    async def score(self, job: Job) -> Scores:
        """Raises ScoringFailed; never makes up a reward."""
        if self._pool is not None:
            components, seconds = await self._pool.score(job)
        else:
            started = time.monotonic()
            components = await score(self._inline, job, timeout_s=self._config.timeout_s)
            seconds = time.monotonic() - started
        rewards = [
            sum(weight * values[name] for name, weight in self._weights) for values in components
        ]
        # Finite components may still overflow when weighted.
        if not all(map(usable_reward, rewards)):
            raise ScoringFailed(
                "reward_error", "the weighted sum of the rewards is not finite or above 1e9"
            )
        return Scores(rewards, components, seconds)

    async def close(self) -> None:
        if self._pool is not None:
            # Shielded: a scoring process must not outlive a worker that is cancelled.
            await asyncio.shield(self._pool.close())
