"""AdamW over fp32 master weights: its state and its update."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor, nn

from paceline.config.training import TrainConfig
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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def apply_update(
    state: TrainState,
    gradients: Gradients,
    reduced: Tensor,
    *,
    norm: float,
    version: Version,
    lr: float,
) -> None:
    """Applies ``reduced``, float32 [gradients.size], which is consumed. ``norm``: of all ranks' parts.
    ``lr``: the plan's.

    The state is ``version`` afterwards, and no local gradients are left. A gradient that is not
    finite changes no weight: all replicas see the same norm, so all of them skip the update.

    It reads nothing but ``reduced``, ``norm``, ``lr`` and the state, all of which are equal on every replica. So
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
            set_learning_rate(state.optimizer, lr)
            state.optimizer.step()
    gradients.clear()
    state.step = Step(state.step + 1)
    state.version = version
