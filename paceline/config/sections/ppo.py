"""Options of ``train.algorithm = "ppo"``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.fields import LocalPath, NonNegative, Positive, Section


class PpoOptions(Section):
    critic_path: LocalPath | None = None
    """Directory or hub name of the model that the critic starts from: a sequence classifier with
    one label, such as a reward model, or a causal language model, whose head is replaced by zeros.
    Its tokenizer is that of model.path. Default: model.path."""
    critic_lr_scale: Annotated[float, Field(gt=0)] = 10.0
    """Learning rate of the critic, as a multiple of train.optimizer.lr; it has the same schedule."""
    value_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the value loss. The critic is a model of its own, with a gradient norm of its own,
    so this matters only if train.optimizer.max_grad_norm clips."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """The value loss counts a value that is further than this from the value before the step at
    least as much as its clipped one. A step makes one update from values before it, so it never
    binds. none disables it."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of rewards, per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalised advantage estimation. 1: the return minus the value. 0: one token
    ahead."""
    value_pretraining_steps: NonNegative = 0
    """First steps, which train the critic only."""
    whiten_advantages: bool = True
    """Subtract the mean of advantages and divide by their standard deviation, both those of the
    steps before."""
    whiten_rewards: bool = False
    """Divide token rewards by their standard deviation around their mean, both those of the steps
    before."""
    moments_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """How much the moments of whitening keep of a step with each later one."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """Coefficient of the KL penalty in the reward. fixed: train.loss.kl_coef. adaptive: it starts there,
    and is raised or lowered towards kl_target after each step."""
    kl_target: Annotated[float, Field(gt=0)] = 6.0
    """KL to the reference that the adaptive controller aims at, in nats per completion."""
    kl_horizon: Positive = 10_000
    """How slowly the adaptive controller moves, in completions: a step of n of them multiplies the
    coefficient by 1 + n / kl_horizon x (relative error of the KL, at most 0.2)."""
