"""AdamW whose moments are in host memory, and on the device a bucket at a time for their update.

    host moments ──► bucket on the device ── the same fused update ──► bucket ──► host moments

The device computes the update, so it is the same bit for bit as with moments that stay there. A
step moves 16 bytes a parameter over the bus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from policy_worker.model.train_state import local_tensor

BUCKET = 1 << 24
"""Elements updated at once: two moments of 64 MiB."""


class HostMomentsAdamW(torch.optim.AdamW):  # type: ignore[misc]
    """AdamW; the state of each parameter is made by zeros_on_host(). ``bucket``: elements on the
    device at once."""

    def __init__(self, params: Any, *, bucket: int = BUCKET, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._bucket = bucket

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of all parameters that have a gradient. The host may read the moments on
        return."""
        loss = None if closure is None else closure()
        device = None
        for group in self.param_groups:
            for bucket in _buckets(self._parts(group), self._bucket):
                device = bucket[0].weights.device
                _update(bucket, group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["step"] += 1
        if device is not None and device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return loss

    def _parts(self, group: dict[str, Any]) -> Iterator[_ParameterPart]:
        """Of at most a bucket each, in the order of the parameters."""
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            whole = (parameter.detach(), parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            flat = [local_tensor(tensor).view(-1).split(self._bucket) for tensor in whole]
            for weights, gradient, first, second in zip(*flat, strict=True):
                if weights.numel():
                    yield _ParameterPart(weights, gradient, first, second, state["step"])


@dataclass(frozen=True, slots=True)
class _ParameterPart:
    """Part of a parameter; all but ``step`` are flat and float32."""

    weights: Tensor
    gradient: Tensor
    first: Tensor
    """Moment on the host, and so is the second."""
    second: Tensor
    step: Tensor
    """Before this update."""


def _buckets(parts: Iterator[_ParameterPart], most: int) -> Iterator[list[_ParameterPart]]:
    bucket: list[_ParameterPart] = []
    filled = 0
    for part in parts:
        if bucket and filled + part.weights.numel() > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(part)
        filled += part.weights.numel()
    if bucket:
        yield bucket


def _update(bucket: list[_ParameterPart], group: dict[str, Any]) -> None:
    device = bucket[0].weights.device
    first, second = (
        [host.to(device, non_blocking=True, copy=True) for host in hosts]
        for hosts in ([p.first for p in bucket], [p.second for p in bucket])
    )
    beta1, beta2 = group["betas"]
    adamw(
        [p.weights for p in bucket],
        [p.gradient for p in bucket],
        first,
        second,
        [],
        # A parameter of several parts takes one step, not one for each part.
        [p.step.clone() for p in bucket],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for part, one, two in zip(bucket, first, second, strict=True):
        part.first.copy_(one, non_blocking=True)
        part.second.copy_(two, non_blocking=True)


def zeros_on_host(parameter: nn.Parameter) -> Tensor:
    """Zeros in the shape of ``parameter``, in host memory that its device can copy from; sliced as
    the parameter is."""
    local = local_tensor(parameter)
    zeros = torch.zeros(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
    if isinstance(parameter, DTensor):
        # from_local() would move them to the device of the mesh.
        return DTensor(zeros, parameter._spec, requires_grad=False)  # type: ignore[call-arg]
    return zeros
