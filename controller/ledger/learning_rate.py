"""Learning rate of a step, as a pure function of the step and the settings of the schedule."""

import math
from dataclasses import dataclass

from paceline.ids import Step


@dataclass(frozen=True, slots=True)
class LearningRate:
    peak: float = 1e-6
    schedule: str = "constant"  # constant, linear or cosine
    warmup_steps: int = 0
    min_ratio: float = 0.0

    def at(self, step: Step, steps: int) -> float:
        """Learning rate of ``step``, counted from 1, in a run of ``steps``. Warm-up is linear, from
        peak / warmup_steps at step 1 to the peak at step warmup_steps. The first step after it has
        the peak. The decay would reach min_ratio * peak at the step after the last one, as in
        transformers' get_linear_schedule_with_warmup: the last batch is trained, too."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        span = steps - self.warmup_steps
        done = min(1.0, (step - 1 - self.warmup_steps) / span) if span > 0 else 1.0
        shape = 1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.min_ratio + (1.0 - self.min_ratio) * shape)
