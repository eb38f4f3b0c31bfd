"""PPO with a critic.

    row ─► policy: log-probs ─► clipped policy loss ◄─────────── whitened A
      └──► critic: V(s_t) ─┬──► GAE(reward - beta KL) ─► A, R ──────┘ │
                           └──► clipped value loss ◄──────────────────┘

Sources: PPO, Schulman et al., arXiv 1707.06347; GAE, arXiv 1506.02438; the KL in the reward, its
controller and the whitening of rewards: Ziegler et al., arXiv 1909.08593, with its code
github.com/openai/lm-human-preferences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.schema import Config
from paceline.config.sections.objective_options import PpoOptions
from policy_worker.objectives.batch import StepTotals, TokenBatch
from policy_worker.objectives.columns import TokenColumns, TokenScores
from policy_worker.objectives.grpo import grpo_loss
from policy_worker.objectives.objective import POLICY, Loss, Objective, Part
from policy_worker.objectives.value_estimates import RunningMoments, adapted, gae

CRITIC = "critic"


class Ppo(Objective):
    """``train.algorithm = "ppo"``. The column ``advantage`` holds the tokens' rewards: advantages
    need the critic."""

    Options = PpoOptions
    options: PpoOptions

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        options = self.options
        self._adaptive = options.kl_controller == "adaptive"
        self._advantages = RunningMoments("advantage", options.moments_decay)
        self._rewards = RunningMoments("reward", options.moments_decay)
        self._moments = [
            *([self._advantages] if options.whiten_advantages else []),
            *([self._rewards] if options.whiten_rewards else []),
        ]

    @property
    def trains(self) -> tuple[Part, ...]:
        critic = Part(
            CRITIC,
            head="scalar",
            path=self.options.critic_path,
            lr_scale=self.options.critic_lr_scale,
            at="before",
            field="objective.critic_path",
        )
        return (*super().trains, critic)

    @property
    def entropy_gradient(self) -> bool:
        return self.config.train.loss.entropy_coef > 0

    # -- numbers of the state -----------------------------------------------------------------

    @property
    def scalars(self) -> dict[str, float]:
        start = {"steps": 0.0}
        for moments in self._moments:
            start |= moments.start
        if self._adaptive:
            start["kl_coef"] = self.config.train.loss.kl_coef
        return start

    @property
    def summed(self) -> tuple[str, ...]:
        names = [name for moments in self._moments for name in moments.summed]
        return (*names, *(("kl", "completions") if self._adaptive else ()))

    def advance(self, scalars: Mapping[str, float], sums: Mapping[str, float]) -> dict[str, float]:
        after = {**scalars, "steps": scalars["steps"] + 1.0}
        for moments in self._moments:
            after |= moments.advance(scalars, sums)
        # A policy that rests stays near its reference: the coefficient would fall for that alone.
        if self._adaptive and sums["completions"] and POLICY not in self.resting(scalars):
            after["kl_coef"] = adapted(
                scalars["kl_coef"],
                sums["kl"] / sums["completions"],
                sums["completions"],
                target=self.options.kl_target,
                horizon=self.options.kl_horizon,
            )
        return after

    def resting(self, scalars: Mapping[str, float]) -> frozenset[str]:
        pretraining = scalars["steps"] < self.options.value_pretraining_steps
        return frozenset({POLICY}) if pretraining else frozenset()

    # -- the summand --------------------------------------------------------------------------

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """[C]: the reward of each token. That of a completion is at its last token that the model
        produced; that of a token which the model did not produce is at the model's token before it,
        or else at its first."""
        starts = np.cumsum(batch.length) - batch.length
        sequence = np.repeat(np.arange(len(batch.length)), batch.length)
        place = np.where(batch.trained > 0, np.arange(len(batch.tokens)), -1)
        last = np.maximum.reduceat(place, starts)
        first = np.minimum.reduceat(np.where(place < 0, len(place), place), starts)
        before = np.maximum(np.maximum.accumulate(place), first[sequence])
        left = batch.reward.copy()
        np.subtract.at(left, sequence[batch.rewarded], batch.token_reward)
        rewards = np.zeros(len(batch.tokens))
        made = last >= 0
        np.add.at(rewards, last[made], left[made])
        own = made[sequence[batch.rewarded]]
        np.add.at(rewards, before[batch.rewarded[own]], batch.token_reward[own])
        return rewards

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        """Measured, per token: those of the policy loss, value_loss (without value_coef),
        value_mean, return_mean, what explained_variance is made of, and with a reference kl (log
        policy - log reference) and kl_coef."""
        options, scalars = self.options, scores.scalars
        rewards, measured, sums = self._token_rewards(scores, tokens)
        if options.whiten_rewards:
            sums |= self._rewards.sums(rewards, tokens.trained, scalars)
            rewards = self._rewards.whitened(rewards, scalars, shift_mean=False) * tokens.trained
        old = scores.values_before[CRITIC]
        advantages, returns = gae(
            rewards,
            old,
            tokens.trained,
            tokens.sequence_of,
            gamma=options.gamma,
            lam=options.gae_lambda,
        )
        error = returns - old
        value = value_loss(scores.values[CRITIC], old, returns, options.value_clip)
        total = options.value_coef * (value * tokens.weight).sum()
        measured |= {
            "value_loss": value.detach(),
            "value_mean": old,
            "return_mean": returns,
            "return_square": returns.square(),
            "value_error": error,
            "value_error_square": error.square(),
        }
        if options.whiten_advantages:
            sums |= self._advantages.sums(advantages, tokens.trained, scalars)
            advantages = self._advantages.whitened(advantages, scalars)
        if POLICY not in self.resting(scalars):
            columns = replace(tokens, advantage=advantages, reference=None)
            entropy = scores.entropy if self.entropy_gradient else None
            settings = self.config.train.loss
            policy = grpo_loss(
                scores.logprobs, columns, settings, before=scores.before, entropy=entropy
            )
            total = total + policy.total
            measured |= policy.measured
        return Loss(total, measured, sums)

    def _token_rewards(
        self, scores: TokenScores, tokens: TokenColumns[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        if tokens.reference is None:
            return tokens.advantage, {}, {}
        kl = scores.before - tokens.reference
        coefficient = (
            scores.scalars["kl_coef"] if self._adaptive else self.config.train.loss.kl_coef
        )
        rewards = tokens.advantage - coefficient * kl * tokens.trained
        measured = {"kl": kl, "kl_coef": torch.full_like(kl, coefficient)}
        if not self._adaptive:
            return rewards, measured, {}
        completions = torch.unique(tokens.sequence_of[tokens.trained > 0]).numel()
        sums = {
            "kl": (kl * tokens.trained).sum(),
            "completions": torch.tensor(float(completions), device=kl.device),
        }
        return rewards, measured, sums


def value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """[C]: 0.5 max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2); without clip 0.5 (V -
    R)^2."""
    loss = (values - returns).square()
    if clip is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss
