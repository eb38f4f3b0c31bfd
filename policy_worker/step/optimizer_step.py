"""Optimizer step: from reduced gradients to new weights, by clipping and AdamW.

It reads nothing but the reduced buffer, its norm and the state, all of which are equal on every
replica. So the new weights are equal bit for bit, too (on machines of one kind).
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from paceline.ids import Step, Version
from paceline.process.structured_log import event
from policy_worker.state import TrainState, local_tensor
from policy_worker.step.gradients import Gradients
from policy_worker.step.optimizer import learning_rate, set_learning_rate

log = logging.getLogger(__name__)


def apply_update(
    state: TrainState, gradients: Gradients, reduced: Tensor, norm: float, version: Version
) -> None:
    """Applies ``reduced``, float32 [gradients.size], which is consumed. ``norm``: of all ranks' parts.

    The state is ``version`` afterwards, and no local gradients are left. A gradient that is not
    finite changes no weight: all replicas see the same norm, so all of them skip the update.
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
