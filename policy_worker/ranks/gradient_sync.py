"""Gradient synchronisation inside a replica: which backward sums the ranks' gradients, and what is
left before it.

Without a sum FSDP2 adds up whole gradients on each rank, in float32; the next backward with one
sums all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reduce_next_backward(models: Iterable[nn.Module], reduce: bool) -> None:
    """Whether the next backward leaves each rank its slice of the sum over ranks of all gradients
    since the last one that did, or adds to whole gradients on each rank. Of unsharded models
    nothing changes."""
    for model in models:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(reduce)


def slices_again(model: nn.Module) -> None:
    """After a forward pass without a backward: its root, and with train.reshard_after_forward =
    false its blocks, are still gathered, and the state would no longer be slices. Of unsharded
    models nothing changes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def drop_unreduced(models: Iterable[nn.Module]) -> None:
    """Drops whole gradients that no backward has reduced."""
    for model in models:
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):  # gathered before
                        parameter._unsharded_param.grad = None
