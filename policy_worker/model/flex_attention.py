"""Flex attention over packed rows: one block-sparse mask for a row, in which a group shares the
keys of its prompt.

Attention by blocks (policy_worker.model.attention) gathers queries, keys and values of a prompt
once for each completion of its group. Here nothing is gathered: a token sees those before it in
the row that belong to its own sequence, or to the prompt of its group.

Source: Dong et al., Flex Attention: A Programming Model for Generating Optimized Attention Kernels,
arXiv 2412.05496.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import scaled_dot_product_attention

from policy_worker.model.attention import (
    Packing,
    RowPattern,
    packed_attention,
    refuse_unsupported,
    register_once,
)

NAME = "paceline_flex"


def register() -> None:
    register_once(NAME, packed_flex_attention)


def packed_flex_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D]; arguments and errors of
    packed_attention(). On a GPU the kernel is compiled at the first row. PyTorch has none for CPUs
    with a backward pass: there the same mask is dense, which is right for checks and slow for long
    rows."""
    if packing is None:
        given = {"scaling": scaling, "sliding_window": sliding_window, **extra}
        return packed_attention(module, query, key, value, attention_mask, **given)
    refuse_unsupported(extra)
    if torch.is_autocast_enabled(query.device.type):
        # Norms and rotary embeddings may have left queries and keys in float32.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    mask = row_mask(packing, sliding_window)
    given = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    if isinstance(mask, BlockMask):
        out = _kernels(query.device.type)[0](query, key, value, block_mask=mask, **given)
    else:
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, **given)
    return out.transpose(1, 2), None


def row_mask(packing: Packing, window: int | None) -> BlockMask | Tensor:
    """The mask of the row, made once for all layers with the same window; on a CPU and with
    gradients bool [1, 1, T, T]."""
    pattern = packing.pattern
    device, tokens = pattern.group.device, len(pattern.group)
    dense = device.type == "cpu" and torch.is_grad_enabled()
    if (window, dense) not in pattern.masks:
        create = create_mask if dense else _kernels(device.type)[1]
        mask = create(_sees(pattern, window), None, None, tokens, tokens, device=device)
        pattern.masks[window, dense] = mask
    found: BlockMask | Tensor = pattern.masks[window, dense]
    return found


def _sees(pattern: RowPattern, window: int | None) -> Callable[..., Tensor]:
    """A function of q and k: true if the token at ``q`` of the row sees the one at ``k``."""
    group, sequence, position = pattern.group, pattern.sequence, pattern.position

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = (sequence[k] == sequence[q]) | (sequence[k] < 0)
        seen = (k <= q) & (group[k] == group[q]) & own
        return seen if window is None else seen & (position[q] - position[k] < window)

    return sees


@cache
def _kernels(device: str) -> tuple[Callable[..., Tensor], Callable[..., BlockMask]]:
    if device != "cuda":
        return flex_attention, create_block_mask
    # Rows differ in length. Without compilation either would hold a matrix of T x T.
    attend: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=True)
    create: Callable[..., BlockMask] = torch.compile(create_block_mask, dynamic=True)
    return attend, create
