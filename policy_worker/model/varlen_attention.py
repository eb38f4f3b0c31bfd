"""Attention over packed rows by a kernel that takes sequences of any lengths side by side.

    row       p p p p a a a b b | q q q c c c c
    itself    p p p p,  a a a,  b b,  q q q,  c c c c        each run with itself, causal
    shared    a a a b b ─► p p p p,   c c c c ─► q q q       runs with the path before them, no mask

The two softmaxes of a token are merged by their log-sum-exp. The kernel's backward
pass computes a part's probabilities from the scores and the log-sum-exp that it is given: with the
merged one, and the merged output, it gives exactly the part's summand of each gradient. Nothing is
padded, no shape is planned for, and no prompt is computed twice. (Of a branch of a branch, keys and
values of the path before it are copied.) Source of the backward pass: Dao,
FlashAttention-2, arXiv 2307.08691.
"""

from typing import Any

import torch
from torch import Tensor

from policy_worker.model.row_layout import RowParts, Sequences


class FlashKernel:
    """torch's flash attention, for bfloat16 and float16 on a CUDA device: q [Tq, H, D], k and v
    [Tk, Hkv, D]; output [Tq, H, D] and log-sum-exp [H, Tq]."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, at: Sequences, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *at, 0.0, causal, False, scale=scale
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, *saved: Tensor, at: Sequences, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. ``saved``: q, k, v, output, log-sum-exp."""
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=grad_out.device)
        rest = 0.0, causal, no_dropout, no_dropout.new_empty(0)
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad_out.contiguous(), *saved, *at, *rest, scale=scale
        )
        return found


LARGEST_HEAD = 256


def flash_kernel(query: Tensor, value: Tensor) -> FlashKernel | None:
    """Flash attention for ``query`` and ``value`` [..., D], None if torch has none for them."""
    head = query.shape[-1]
    takes = (
        query.device.type == "cuda"
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and value.shape[-1] == head <= LARGEST_HEAD
        and head % 8 == 0
    )
    return FlashKernel() if takes else None


class MergedAttention(torch.autograd.Function):  # type: ignore[misc]
    """q [T, H, D], k and v [T, Hkv, D] of a row -> [T, H, D], by a FlashKernel."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: RowParts, kernel: Any, scale: float
    ) -> Tensor:
        out, lse = kernel.forward(q, k, v, parts.itself, scale, True)
        if parts.shared is not None:
            queries, keys = parts.queries, parts.keys
            seen_k, seen_v = (x.index_select(0, keys) for x in (k, v))
            asking = q.index_select(0, queries)
            other, other_lse = kernel.forward(asking, seen_k, seen_v, parts.shared, scale, False)
            alone, alone_lse = out.index_select(0, queries), lse.index_select(1, queries)
            share = torch.sigmoid(other_lse - alone_lse).transpose(0, 1).unsqueeze(-1)
            merged = torch.lerp(alone.to(share.dtype), other.to(share.dtype), share)
            out = out.index_copy(0, queries, merged.to(out.dtype))
            lse = lse.index_copy(1, queries, torch.logaddexp(alone_lse, other_lse))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = parts, kernel, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        parts, kernel, scale = ctx.settings
        every = grad_out, q, k, v, out, lse
        found = kernel.backward(*every, at=parts.itself, scale=scale, causal=True)
        if parts.shared is not None:
            queries, keys = parts.queries, parts.keys
            rows = (
                *(x.index_select(0, queries) for x in (grad_out, q)),
                *(x.index_select(0, keys) for x in (k, v)),
            )
            merged = out.index_select(0, queries), lse.index_select(1, queries)
            more = kernel.backward(*rows, *merged, at=parts.shared, scale=scale, causal=False)
            for total, place, part in zip(found, (queries, keys, keys), more, strict=True):
                total.index_add_(0, place, part)
        return *found, None, None, None
