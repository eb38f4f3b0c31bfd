"""Packed attention: attention over rows without padding, as a transformers attention function.

A row of tokens holds many sequences and no padding; linear layers, norms and embeddings work on it
as it is. Only attention depends on the tokens that see each other. It gets a ``Packing`` with the
row and gathers, per block of sequences of similar length, queries, keys and values into [N, L],
runs causal attention there, and picks each row token's output out of the blocks. Padding exists in
these blocks only; it sits after the tokens of each sequence, so causality hides it. A token may be
gathered by several sequences: the completions of a group share the one copy of their prompt in the
row, and branches of a sample what they have in common.

Flex attention gathers nothing. One block-sparse mask serves the row: a token sees those before it
whose subtree it is in. Source: Dong et al., Flex Attention:
A Programming Model for Generating Optimized Attention Kernels, arXiv 2412.05496.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from policy_worker.model.row_layout import Packing
from policy_worker.objectives.batch import Ints


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One row of T tokens, and the C target tokens of S sequences that are predicted from it."""

    input_ids: Tensor
    """int64 [1, T]"""
    position_ids: Tensor
    """int64 [1, T]"""
    packing: Packing
    predict_from: Tensor
    """int64 [C], row positions whose output predicts each target."""
    targets: Tensor
    """int64 [C], token ids."""
    token_index: Ints
    """[C], index of each target in the batch's token columns."""
    sequence_index: Ints
    """[S], indices of these sequences in the batch."""
    sequence_of: Tensor
    """int64 [C], the target's sequence, from 0 to S - 1."""
    token_at: Tensor | None = None
    """int64 [C], row position of each target; None if last tokens are not in the row."""


BLOCKS, FLEX = "paceline_packed", "paceline_flex"
"""Names of the implementations of attention."""
SMALLEST_HEAD = 16
"""Dimensions of a head that the kernel of flex attention takes."""
UNSUPPORTED = ("softcap", "position_bias")
"""Arguments of some models (Gemma 2, T5) that must not be ignored in silence."""


def register() -> None:
    """Makes the implementations known to transformers. One that is stays as it is: compilation
    of blocks may have taken its function out since."""
    for name, attend in ((BLOCKS, packed_attention), (FLEX, packed_flex_attention)):
        if name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(name, attend)
            AttentionMaskInterface.register(name, packed_mask)


def packed_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """No mask for packed rows (Packing says it all); a padded batch gets the ordinary one."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packing: Packing | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D]. With ``packing``, B is 1
    and T is the row. Without, an ordinary causal batch. ``s_aux``: sinks [H]. Raises
    NotImplementedError for what would change the scores and is not done here."""
    refuse_unsupported(extra)
    if packing is None:
        mask = attention_mask
        if mask is None:
            mask = _window_mask(query.shape[2], sliding_window, query.device)
        return _sdpa(query, key, value, mask, scaling, s_aux).transpose(1, 2), None
    # Rows of [T, H, D] and [T, Hkv, D]: these transposes undo the model's own, so they are views
    # of what its projections wrote.
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    outputs = []
    blocks, collapse = packing.blocks
    for block in blocks:
        shape = (block.sequences, block.length)
        q, k, v = (
            row.index_select(0, block.gather).view(*shape, *row.shape[1:]).transpose(1, 2)
            for row in rows
        )
        mask = _window_mask(block.length, sliding_window, q.device)
        out = _sdpa(q, k, v, mask, scaling, s_aux).transpose(1, 2)
        outputs.append(out.reshape(block.sequences * block.length, *out.shape[2:]))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, collapse).unsqueeze(0), None


def refuse_unsupported(arguments: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for an argument that would change the scores."""
    for name in UNSUPPORTED:
        if arguments.get(name) is not None:
            raise NotImplementedError(f"packed attention does not implement {name!r}")


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``mask``: bool [L, L]; None for plain causality. ``sinks`` [H]: score of one more key of each
    head, whose value is zero: it takes its share of the attention (gpt-oss)."""
    if sinks is not None:
        length = q.shape[2]
        k, v = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        seen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        seen = seen.masked_fill(~mask, -torch.inf).expand(q.shape[1], -1, -1)
        last = sinks.to(q.dtype)[:, None, None].expand(-1, length, 1)
        mask = torch.cat([seen, last], -1)
    causal, grouped = mask is None and q.shape[2] > 1, q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Causal mask [L, L] of a sliding window; None if plain causality is the same."""
    if window is None or window >= length:
        return None
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)


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
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, Hkv, T, D] -> [B, T, H, D]; arguments and errors of
    packed_attention(). On a GPU the kernel is compiled at the first row. PyTorch has none for CPUs
    with a backward pass: there the same mask is dense, which is right for checks and slow for long
    rows."""
    if packing is None or (query.is_cuda and query.shape[-1] < SMALLEST_HEAD):
        given = {"scaling": scaling, "sliding_window": sliding_window, "packing": packing, **extra}
        return packed_attention(module, query, key, value, attention_mask, s_aux=s_aux, **given)
    refuse_unsupported(extra)
    mask = row_mask(packing, sliding_window)
    if not isinstance(mask, BlockMask):
        dense = mask[0, 0]
        return _sdpa(query, key, value, dense, scaling, s_aux).transpose(1, 2), None
    given = {"block_mask": mask, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    attend = _kernels(query.device.type)[0]
    if s_aux is None:
        return attend(query, key, value, **given).transpose(1, 2), None
    out, aux = attend(query, key, value, return_aux=AuxRequest(lse=True), **given)
    share = torch.sigmoid(aux.lse - s_aux[:, None].to(aux.lse.dtype))
    return (out * share.unsqueeze(-1).to(out.dtype)).transpose(1, 2), None


def row_mask(packing: Packing, window: int | None) -> BlockMask | Tensor:
    """The row's mask, made once for a window; with gradients on a CPU bool [1, 1, T, T]."""
    device, tokens = packing.position.device, len(packing.position)
    dense = device.type == "cpu" and torch.is_grad_enabled()
    if (window, dense) not in packing.masks:
        create = create_mask if dense else _kernels(device.type)[1]
        mask = create(_sees(packing, window), None, None, tokens, tokens, device=device)
        packing.masks[window, dense] = mask
    found: BlockMask | Tensor = packing.masks[window, dense]
    return found


def _sees(packing: Packing, window: int | None) -> Callable[..., Tensor]:
    """A function of q and k: true if the token at ``q`` of the row sees the one at ``k``."""
    until, position = packing.seen_until, packing.position

    def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (q < until[k])
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
