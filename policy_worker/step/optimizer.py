"""AdamW over fp32 master weights: its state, on the device or in host memory, and its update.

    host moments ──► part on the device ── the same fused update ──► part ──► host moments

The device computes the update of moments that are in host memory, a part at a time, so it is the
same bit for bit as with moments that stay there. A step moves 16 bytes a parameter over the bus.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from paceline.config.sections.training import TrainConfig
from policy_worker.model.train_state import local_tensor


def build_optimizer(
    parts: Mapping[str, nn.Module], config: TrainConfig, lr_scales: Mapping[str, float] = {}
) -> torch.optim.AdamW:
    """AdamW with decoupled weight decay on matrices only: norms and biases (one dimension) have
    none.

    ``lr_scales``: learning rate of a part as a multiple of the step's; default 1. The state
    (exp_avg, exp_avg_sq, step) exists from the start, as zeros, so that a fresh replica can be
    restored, or receive the state, in place. With train.memory.offload_optimizer the moments are
    in host memory. Source: Loshchilov and Hutter, arXiv 1711.05101.
    """
    settings = config.optimizer
    groups: list[dict[str, object]] = []
    for name, model in parts.items():
        parameters = [p for p in model.parameters() if p.requires_grad]
        scale = lr_scales.get(name, 1.0)
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


BUCKET = 1 << 24
"""Most elements updated at once: two moments of 64 MiB."""


class HostMomentsAdamW(torch.optim.AdamW):  # type: ignore[misc]
    """AdamW on state of zeros_on_host(). ``bucket``: elements on the device at once."""

    def __init__(self, params: Any, *, bucket: int = BUCKET, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._bucket = bucket

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        """Updates all parameters with a gradient. The host may read the moments on return."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                whole = (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
                flat = [local_tensor(tensor).view(-1).split(self._bucket) for tensor in whole]
                for weights, *others in zip(*flat, strict=True):
                    if weights.numel():
                        # All parts take the same step.
                        _update(weights, others, state["step"].clone(), group)
                state["step"] += 1
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()


def _update(weights: Tensor, others: list[Tensor], step: Tensor, group: dict[str, Any]) -> None:
    """Updates a part of a parameter, flat and float32. ``others``: its gradient, and its two
    moments, which are on the host."""
    gradient, *moments = others
    there = [moment.to(weights.device, non_blocking=True, copy=True) for moment in moments]
    beta1, beta2 = group["betas"]
    adamw(
        [weights],
        [gradient],
        there[:1],
        there[1:],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for host, moved in zip(moments, there, strict=True):
        host.copy_(moved, non_blocking=True)


def zeros_on_host(parameter: nn.Parameter) -> Tensor:
    """Zeros like ``parameter``, sliced as it is, in host memory that its device copies from."""
    local = local_tensor(parameter)
    zeros = torch.zeros(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
    if isinstance(parameter, DTensor):
        # from_local() would move them to the device of the mesh.
        return DTensor(zeros, parameter._spec, requires_grad=False)  # type: ignore[call-arg]
    return zeros
