"""Token weights of the loss, such that the plain sum over a whole step is the loss.

They depend only on the step's totals and on a sequence's own length, never on the replica or
micro-batch of the sequence. So gradients of parts add up to the gradient of the whole step. Sources:
token_mean, DAPO, arXiv 2503.14476; sequence_mean, GRPO, arXiv 2402.03300; dr_grpo, arXiv 2503.20783.
"""

from __future__ import annotations

import numpy as np

from paceline.config.schema import Config
from policy_worker.step.batch import Floats, Ints


def token_weights(
    trained: Floats, length: Ints, tokens: int, sequences: int, config: Config
) -> Floats:
    """trained [C] (1 or 0), length [S] in tokens (their sum is C) -> float32 [C].

    ``tokens`` (trainable) and ``sequences`` are those of the whole step, on all replicas. token_mean: 1 / tokens of the step. sequence_mean: 1 / (the sequence's trainable tokens *
    sequences of the step). dr_grpo: 1 / (rollout.max_tokens * sequences of the step). 0 for tokens that are not trained.
    """
    if config.train.aggregation == "token_mean":
        return trained / np.float32(max(tokens, 1))
    if config.train.aggregation == "dr_grpo":
        return trained / np.float32(config.rollout.max_tokens * max(sequences, 1))
    starts = np.cumsum(length) - length
    own = np.maximum(np.add.reduceat(trained.astype(np.float64), starts), 1.0)
    weights: Floats = (trained / np.repeat(own * max(sequences, 1), length)).astype(np.float32)
    return weights
