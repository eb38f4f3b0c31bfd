"""Group-relative advantages: the reward of a completion compared with those of its group.

Sources: GRPO, Shao et al., arXiv 2402.03300; without the division by the standard deviation: Dr. GRPO,
Liu et al., arXiv 2503.20783.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policy_worker.step.batch import Ints

EPSILON = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not explode."""


def group_advantages(
    reward: NDArray[np.float64], sequences: Ints, *, normalise: bool
) -> NDArray[np.float64]:
    """reward [S], group after group, ``sequences`` [G] in each -> advantages [S].

    reward - mean of the group; with ``normalise`` divided by (standard deviation of the group, of a
    sample, + EPSILON). Exactly 0 throughout a group whose rewards are all equal.
    """
    group = np.repeat(np.arange(len(sequences)), sequences)
    mean = np.bincount(group, reward, len(sequences)) / sequences
    starts = np.cumsum(sequences) - sequences
    lowest = np.minimum.reduceat(reward, starts)
    equal = lowest == np.maximum.reduceat(reward, starts)
    # The mean of equal numbers may differ from them in the last bit.
    centred = np.where(equal[group], 0.0, reward - mean[group])
    if not normalise:
        return centred
    variance = np.bincount(group, centred**2, len(sequences)) / np.maximum(sequences - 1, 1)
    result: NDArray[np.float64] = centred / (np.sqrt(variance) + EPSILON)[group]
    return result
