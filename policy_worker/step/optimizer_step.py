"""From reduced gradients to new weights: clip, AdamW, one step further.

Reads nothing but the reduced buffer, its norm and the state, all of which are equal on every
replica; so what it writes is, too, bit for bit (on machines of one kind).
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from paceline.process.structured_log import event
from policy_worker.state import TrainState, local_tensor
from policy_worker.step.gradients import Gradients
from policy_worker.step.optimizer import learning_rate, set_learning_rate

log = logging.getLogger(__name__)


@torch.no_grad()
def apply_update(
    state: TrainState, gradients: Gradients, reduced: Tensor, norm: float, version: int
) -> None:
    """``reduced``: float32 [gradients.size], consumed. ``norm``: of the whole gradient, all ranks.

    The state is ``version`` afterwards, and no local gradients are left. A gradient that is not
    finite changes no weight: all replicas see the same norm, so all leave them alone.
    """
    config = state.config.train
    if math.isfinite(norm):
        if config.max_grad_norm is not None and norm > config.max_grad_norm:
            reduced.mul_(config.max_grad_norm / (norm + 1e-6))
        for parameter, part in zip(gradients.parameters, gradients.views(reduced), strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local_tensor(parameter.grad).copy_(part)
        set_learning_rate(state.optimizer, learning_rate(state.step + 1, config))
        state.optimizer.step()
    else:
        event(log, "gradient not finite, update skipped", logging.ERROR, version=version)
    gradients.clear()
    state.step += 1
    state.version = version
