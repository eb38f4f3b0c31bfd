"""Generalised advantage estimation over the tokens of packed completions.

Source: Schulman et al., "High-dimensional continuous control using generalized advantage
estimation", arXiv 1506.02438, equation 16.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    trained: Tensor,
    sequence_of: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (value targets), [C] each, in the dtype of ``values``; 0 where nothing
    is trained.

    rewards, values, trained (1 or 0): [C], tokens of each sequence side by side and in order;
    sequence_of: int64 [C], not falling. ``values`` are V(s_t), of the state in which token t is
    chosen. With t + 1 the next *trained* token of the sequence, and V = 0 after the last one:

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    Tokens that are not trained (an environment's, or too old ones) are no actions: they are
    skipped, without a discount, and so the value carries over to the next action. Their rewards are
    not counted.
    """
    places = trained.nonzero()[:, 0]
    sequence = sequence_of[places]
    goes_on = torch.zeros(len(places), dtype=values.dtype, device=values.device)
    if len(places):
        goes_on[:-1] = (sequence[1:] == sequence[:-1]).to(values.dtype)
    value = values[places]
    following = goes_on * torch.cat([value[1:], value.new_zeros(1)])[: len(places)]
    advantage = rewards[places].to(values.dtype) + gamma * following - value
    # A_t = delta_t + c_t A_{t+1}, for all t at once: after n doublings A_t holds the terms of 2^n
    # tokens, and c_t is their discount, 0 beyond the end of the sequence. 15 passes for 32,768
    # tokens, in place of as many steps.
    discount = gamma * lam * goes_on
    reach = 1
    while reach < len(places) and bool(discount.any()):
        advantage = advantage + discount * _shifted(advantage, reach)
        discount = discount * _shifted(discount, reach)
        reach *= 2
    zeros = torch.zeros_like(values)
    return (
        zeros.index_copy(0, places, advantage),
        zeros.index_copy(0, places, advantage + value),
    )


def _shifted(column: Tensor, by: int) -> Tensor:
    """Element t + ``by`` at t; 0 beyond the end."""
    return torch.cat([column[by:], column.new_zeros(by)])
