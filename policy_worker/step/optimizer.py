"""AdamW over fp32 master weights: its state, the learning rate of a step, and the update."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor, nn

from paceline.config.schema import TrainConfig
from paceline.ids import Step, Version
from paceline.process.structured_log import event
from policy_worker.state import TrainState, local_tensor
from policy_worker.step.gradients import Gradients

log = logging.getLogger(__name__)


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

    Warm-up is linear, from lr / warmup_steps at step 1 to lr at step warmup_steps. The first step after
    it has lr. The decay would reach min_lr_ratio * lr at the step after the last one, as in transformers'
    get_linear_schedule_with_warmup: the last batch is trained, too.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = config.steps - config.warmup_steps
    done = min(1.0, (step - 1 - config.warmup_steps) / span) if span > 0 else 1.0
    shape = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def apply_update(
    state: TrainState, gradients: Gradients, reduced: Tensor, norm: float, version: Version
) -> None:
    """Applies ``reduced``, float32 [gradients.size], which is consumed. ``norm``: of all ranks' parts.

    The state is ``version`` afterwards, and no local gradients are left. A gradient that is not
    finite changes no weight: all replicas see the same norm, so all of them skip the update.

    It reads nothing but ``reduced``, ``norm`` and the state, all of which are equal on every replica. So
    the new weights are equal bit for bit, too (on machines of one kind).
    """
    config = state.config.train
    if not math.isfinite(norm):
        event(log, "gradient not finite, update skipped", logging.ERROR, version=version)
    else:
        with torch.no_grad():
            if config.max_grad_norm is not None and norm > config.max_grad_norm:
                reduced.mul_(config.max_grad_norm / (norm + 1e-6))
            parts = zip(gradients.parameters, gradients.views(reduced), strict=True)
            for parameter, part in parts:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local_tensor(parameter.grad).copy_(part)
            set_learning_rate(state.optimizer, learning_rate(state.step + 1, config))
            state.optimizer.step()
    gradients.clear()
    state.step = Step(state.step + 1)
    state.version = version
