"""KL estimators: KL(policy || reference) from the policy's own samples.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from torch import Tensor

from policy_worker.objectives.proximal_policy import LOG_RATIO_LIMIT


def token_kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per token, of log-probs [C] of the sampled tokens; differentiable in ``logprobs``.

    With r = reference / policy: k1 = -log r (unbiased), k2 = (log r)^2 / 2 (its gradient is that of
    the KL), k3 = r - 1 - log r (unbiased, never negative).
    """
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    return torch.expm1(log_r.clamp(max=LOG_RATIO_LIMIT)) - log_r
