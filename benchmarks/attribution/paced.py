"""Training that takes its time, as on devices that are full: its steps leave the cores of this
machine to others."""

import sys
import time

import numpy as np
from numpy.typing import NDArray

from policy_worker.objectives.batch import StepTotals, TokenBatch
from policy_worker.objectives.grpo import Grpo

SEQUENCE_S = 0.3


class Paced(Grpo):
    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """Advantages of GRPO, after a wait for each sequence: one replica takes twice as long."""
        # The check of an own objective before the start computes hundreds of batches: they are no
        # training.
        if "policy_worker.main" in sys.modules:
            time.sleep(SEQUENCE_S * float(batch.sequences.sum()))
        return super().advantages(batch, totals)
