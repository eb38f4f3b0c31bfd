"""Load-balancing loss of a mixture of experts, sequence by sequence.

The auxiliary loss of the Switch Transformer multiplies two means over a whole batch, so it is no
sum over groups, and a step that is split over replicas would have another one. The sequence-wise
form is such a sum:

    L = coefficient / sequences * sum over sequences of mean over layers of sum_i f_i P_i
    f_i = experts / (chosen * T) * (times that the router chose expert i in the sequence's T trained tokens)
    P_i = mean over those tokens of the router's probability of expert i

f is a constant, the gradient goes through P. sum_i f_i P_i is 1 if all experts get an equal share.
Sources: DeepSeek-V3, arXiv 2412.19437, equations 17 to 20; the loss of a batch: Switch
Transformers, arXiv 2101.03961.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def balance_of_sequences(
    routers: Sequence[Tensor], trained: Tensor, sequence_of: Tensor, sequences: int, chosen: int
) -> Tensor:
    """Mean over layers of sum_i f_i P_i, of each sequence: float32 [sequences], with graph.

    routers: of each layer, logits [C, experts] at the positions that predict the tokens. trained:
    float32 [C], 1 or 0. sequence_of: int64 [C]. chosen: experts that a token goes to. 0 for a
    sequence without a trained token.
    """
    tokens = trained.new_zeros(sequences).index_add_(0, sequence_of, trained).clamp(min=1.0)
    total = trained.new_zeros(sequences)
    for logits in routers:
        experts = logits.shape[-1]
        probabilities = torch.softmax(logits.float(), -1) * trained[:, None]
        mean = trained.new_zeros(sequences, experts).index_add(0, sequence_of, probabilities)
        with torch.no_grad():
            picked = torch.zeros_like(probabilities).scatter_(
                1, logits.topk(chosen, -1).indices, trained[:, None].expand(-1, chosen)
            )
            share = torch.zeros_like(mean).index_add_(0, sequence_of, picked)
            share *= experts / chosen / tokens[:, None]
        total = total + (share * mean / tokens[:, None]).sum(-1)
    return total / max(len(routers), 1)


def experts_per_token(model: nn.Module) -> int:
    """Experts that each token goes to; 0 if ``model`` (of transformers) reports no logits of
    routers."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if "router_logits" not in (getattr(base, "_can_record_outputs", None) or {}):
        return 0
    return int(getattr(model.config.get_text_config(), "num_experts_per_tok", 0) or 0)
