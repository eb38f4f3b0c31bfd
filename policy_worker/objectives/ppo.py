"""PPO with a critic.

    row ─► policy: log-probs ─► clipped policy loss ◄─────────── whitened A
      └──► critic: V(s_t) ─┬──► GAE(reward - beta KL) ─► A, R ──────┘ │
                           └──► clipped value loss ◄──────────────────┘

Sources: PPO, Schulman et al., arXiv 1707.06347; GAE, arXiv 1506.02438; the KL in the reward, its
controller (section 2.2) and the whitening of rewards: Ziegler et al., arXiv 1909.08593, with its
code github.com/openai/lm-human-preferences. Running moments: Chan, Golub and LeVeque, "Updating
formulae and a pairwise algorithm for computing sample variances", 1979.

Moments of the step itself cannot whiten it: a group's summand would depend on the other groups, and
a replica sees only its share of them. So a step is whitened by the moments of the steps before it,
which all replicas hold, and its own sums enter the moments when it is committed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.schema import Config
from paceline.config.sections.objective_options import PpoOptions
from policy_worker.objectives.advantages import on_prefixes
from policy_worker.objectives.batch import StepTotals, TokenBatch
from policy_worker.objectives.columns import TokenColumns, TokenScores
from policy_worker.objectives.grpo import grpo_loss
from policy_worker.objectives.objective import POLICY, Loss, Objective, Part

CRITIC = "critic"


class Ppo(Objective):
    """``train.algorithm = "ppo"``. The column ``advantage`` holds the tokens' rewards."""

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
        produced, less what its tokens and those of its prefix got; that of a token which the model
        did not produce is at the model's token before it, or else at its first."""
        starts = np.cumsum(batch.length) - batch.length
        sequence = np.repeat(np.arange(len(batch.length)), batch.length)
        place = np.where(batch.trained > 0, np.arange(len(batch.tokens)), -1)
        last = np.maximum.reduceat(place, starts)
        first = np.minimum.reduceat(np.where(place < 0, len(place), place), starts)
        before = np.maximum(np.maximum.accumulate(place), first[sequence])
        left = batch.reward - on_prefixes(batch, batch.token_reward)
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
    """[C]: 0.5 max((V - R)^2, (V_clipped - R)^2); without clip 0.5 (V - R)^2."""
    loss = (values - returns).square()
    if clip is not None:
        clipped = old + (values - old).clamp(-clip, clip)
        loss = torch.maximum(loss, (clipped - returns).square())
    return 0.5 * loss


def gae(
    rewards: Tensor,
    values: Tensor,
    trained: Tensor,
    sequence_of: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (value targets), [C] each, in the dtype of ``values``; 0 where nothing
    is trained.

    rewards, values, trained (1 or 0): [C], tokens of each sequence side by side and in order;
    sequence_of: int64 [C], not falling. ``values`` are V(s_t), of the state in which token t is
    chosen. With t + 1 the next *trained* token of the sequence, and V = 0 after the last one:

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    Tokens that are not trained (an environment's, or too old ones) are no actions: they are
    skipped, without a discount, and so the value carries over to the next action. Their rewards are
    not counted.
    """
    places = trained.nonzero()[:, 0]
    sequence = sequence_of[places]
    goes_on = torch.zeros(len(places), dtype=values.dtype, device=values.device)
    if len(places):
        goes_on[:-1] = (sequence[1:] == sequence[:-1]).to(values.dtype)
    value = values[places]
    following = goes_on * torch.cat([value[1:], value.new_zeros(1)])[: len(places)]
    advantage = rewards[places].to(values.dtype) + gamma * following - value
    # A_t = delta_t + c_t A_{t+1}, for all t at once: after n doublings A_t holds the terms of 2^n
    # tokens, and c_t is their discount, 0 beyond the end of the sequence. 15 passes for 32,768
    # tokens, in place of as many steps.
    discount = gamma * lam * goes_on
    reach = 1
    while reach < len(places) and bool(discount.any()):
        advantage = advantage + discount * _shifted(advantage, reach)
        discount = discount * _shifted(discount, reach)
        reach *= 2
    zeros = torch.zeros_like(values)
    made = advantage, advantage + value
    return zeros.index_copy(0, places, made[0]), zeros.index_copy(0, places, made[1])


def _shifted(column: Tensor, by: int) -> Tensor:
    """Element t + ``by`` at t; 0 beyond the end."""
    return torch.cat([column[by:], column.new_zeros(by)])


EPSILON = 1e-4
"""Smallest standard deviation, so that equal values do not explode."""


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Exponentially weighted: a step counts ``decay`` times as much with each one after it."""

    name: str
    decay: float

    @property
    def start(self) -> dict[str, float]:
        """The state's numbers before the first step."""
        return {f"{self.name}_{what}": 0.0 for what in ("weight", "mean", "squares")}

    @property
    def summed(self) -> tuple[str, ...]:
        """Names of the sums that a step adds."""
        return tuple(f"{self.name}_{what}" for what in ("count", "shifted", "shifted_square"))

    def sums(
        self, values: Tensor, trained: Tensor, scalars: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Sums of one row of values [C], about the present mean: float32 is exact enough then."""
        shifted = (values - scalars[f"{self.name}_mean"]) * trained
        sums = (trained.sum(), shifted.sum(), shifted.square().sum())
        return dict(zip(self.summed, sums, strict=True))

    def advance(self, scalars: Mapping[str, float], sums: Mapping[str, float]) -> dict[str, float]:
        """The state's numbers after a step whose sums over all replicas are ``sums``."""
        count, shifted, square = (sums[name] for name in self.summed)
        weight, mean, squares = (scalars[name] for name in self.start)
        if count == 0:
            return {name: scalars[name] for name in self.start}
        ago = self.decay * weight
        step = shifted / count  # mean of the step, minus ``mean``
        own = max(0.0, square - count * step * step)
        total = ago + count
        numbers = (
            total,
            mean + step * count / total,
            self.decay * squares + own + step * step * ago * count / total,
        )
        return dict(zip(self.start, numbers, strict=True))

    def of(self, scalars: Mapping[str, float]) -> tuple[float, float]:
        """Mean and standard deviation; 0 and 1 before the first step."""
        weight, mean, squares = (scalars[name] for name in self.start)
        return (mean, (squares / weight) ** 0.5) if weight else (0.0, 1.0)

    def whitened(
        self, values: Tensor, scalars: Mapping[str, float], *, shift_mean: bool = True
    ) -> Tensor:
        """(values - mean) / standard deviation, plus the mean again if not ``shift_mean``."""
        mean, deviation = self.of(scalars)
        white = (values - mean) / max(deviation, EPSILON)
        return white if shift_mean else white + mean


ERROR_LIMIT = 0.2
"""Relative errors are clipped to it, so that one step cannot throw the coefficient about."""


def adapted(
    coefficient: float, kl: float, completions: float, *, target: float, horizon: float
) -> float:
    """The coefficient after a step of ``completions`` with the mean ``kl``, in nats per completion.
    error = clip(kl / target - 1, -0.2, 0.2); coefficient * (1 + error * completions / horizon). The
    paper's gain of 0.1 is that of its batches: 1,024 completions of a horizon of 10,000. In one
    step the coefficient falls to a tenth at most: from 0 it could never rise again."""
    error = min(max(kl / target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * max(0.1, 1.0 + error * completions / horizon)
