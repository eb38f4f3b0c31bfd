"""AdamW over fp32 master weights: its state and its update."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.config.sections.training import TrainConfig
from paceline.ids import Step, Version
from paceline.process.structured_log import event
from policy_worker.model.host_moments import HostMomentsAdamW, zeros_on_host
from policy_worker.model.train_state import TrainState, local_tensor
from policy_worker.step.gradients import Gradients

log = logging.getLogger(__name__)


def build_optimizer(
    parts: Mapping[str, nn.Module],
    config: TrainConfig,
    lr_scales: Mapping[str, float] | None = None,
) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices only: norms and biases (one dimension) have
    none.

    ``lr_scales``: learning rate of a part as a multiple of the step's; default 1. The state
    (exp_avg, exp_avg_sq, step) exists from the start, as zeros, so that a fresh replica can be
    restored, or receive the state, in place. With train.memory.offload_optimizer the moments are in host
    memory. Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    settings = config.optimizer
    groups: list[dict[str, object]] = []
    for name, model in parts.items():
        parameters = [p for p in model.parameters() if p.requires_grad]
        scale = (lr_scales or {}).get(name, 1.0)
        matrices = [p for p in parameters if p.ndim >= 2]
        vectors = [p for p in parameters if p.ndim < 2]
        for params, decay in ((matrices, settings.weight_decay), (vectors, 0.0)):
            if params:
                groups.append({"params": params, "weight_decay": decay, "lr_scale": scale})
    adamw = HostMomentsAdamW if config.memory.offload_optimizer else torch.optim.AdamW
    optimizer = adamw(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    zeros = zeros_on_host if config.memory.offload_optimizer else torch.zeros_like
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": zeros(parameter),
                "exp_avg_sq": zeros(parameter),
            }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """``lr``: of the step; each part has its multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def apply_update(
    state: TrainState,
    gradients: Gradients,
    reduced: Tensor,
    *,
    norms: Mapping[str, float],
    sums: Mapping[str, float],
    version: Version,
    lr: float,
) -> None:
    """Applies ``reduced``, float32 [gradients.size], which is consumed. ``norms``: of each part's
    gradient, over all ranks; each is clipped by itself. ``sums``: of the objective, over all ranks.
    ``lr``: the plan's.

    The state is ``version`` afterwards, and no local gradients are left. A gradient that is not
    finite changes no part: all replicas see the same norms, so all of them skip the update.

    It reads nothing but ``reduced``, ``norms``, ``sums``, ``lr`` and the state, all of which are
    equal on every replica. So the new weights are equal bit for bit, too (on machines of one kind).
    """
    largest = state.config.train.optimizer.max_grad_norm
    if not all(map(math.isfinite, [*norms.values(), *sums.values()])):
        event(log, "gradient not finite, update skipped", logging.ERROR, version=version)
    else:
        with torch.no_grad():
            for part, where in gradients.part_slices.items():
                if largest is not None and norms[part] > largest:
                    reduced[where].mul_(largest / (norms[part] + 1e-6))
            parts = zip(gradients.parameters, gradients.views(reduced), strict=True)
            for parameter, part in parts:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local_tensor(parameter.grad).copy_(part)
            scalars = {name: float(number) for name, number in state.scalars.items()}
            for name in gradients.objective.resting(scalars):
                for parameter in state.parts[name].parameters():
                    parameter.grad = None  # no decay either, and no step of the moments
            set_learning_rate(state.optimizer, lr)
            state.optimizer.step()
            for name, number in gradients.objective.advance(scalars, sums).items():
                state.scalars[name].fill_(number)
    gradients.clear()
    state.step = Step(state.step + 1)
    state.version = version
