"""AdamW over fp32 master weights, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math

import torch
from torch import nn

from paceline.config.schema import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices only: norms and biases (one dimension) have none.

    The state (exp_avg, exp_avg_sq, step) exists from the start, as zeros, so that a fresh replica
    can be restored, or receive the state, in place. Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of step ``step`` (counted from 1).

    Warm-up is linear, from lr / warmup_steps at step 1 to lr at step warmup_steps; the decay then
    reaches min_lr_ratio * lr at the last step of the run.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = config.steps - config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / span) if span > 0 else 1.0
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
