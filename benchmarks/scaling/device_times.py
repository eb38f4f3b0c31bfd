"""Device times of emulated GPUs, and how the processes of a fleet get them.

An engine advances every running sequence by one token in ``step_s + sequence_s * running``.
Training takes ``update_s`` GPU seconds a token, divided by the trainer's GPUs, and a constant.
Weights take ``transfer_s`` to arrive, while engines go on, and ``swap_s`` to be swapped in, while
they do not.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from testbed.planner.lengths import Lengths

VARIABLE = "PACELINE_EMULATED"
ROOT = Path(__file__).resolve().parents[2]
PROMPTS_DRAWN = 20_000


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    slots: int = 16
    """Sequences that one engine runs at once."""
    step_s: float = 0.04
    sequence_s: float = 0.0008
    update_s: float = 0.0012
    update_constant_s: float = 0.1
    transfer_s: float = 0.15
    swap_s: float = 0.02
    switch_s: float = 0.1
    """To give a device up, or to take it again: trainer or engine."""
    policy_gpus: int = 1
    median_tokens: float = 16.0
    sigma: float = 0.7
    """Spread of log lengths."""
    most_tokens: int = 64

    @property
    def lengths(self) -> Lengths:
        return Lengths(self.median_tokens, self.sigma, self.most_tokens)

    def token_s(self, running: int) -> float:
        """Seconds in which each of ``running`` sequences of an engine gets a token."""
        return self.step_s + self.sequence_s * running

    def training_s(self, tokens: int, gpus: int) -> float:
        return self.update_s * tokens / gpus

    def group_stretch(self, group_size: int) -> float:
        """Mean tokens of the longest completion of a group, of the mean of all completions."""
        drawn = self.lengths.draw(np.random.default_rng(0), PROMPTS_DRAWN, group_size)
        return float(drawn.max(axis=1).mean() / drawn.mean())

    def environment(self) -> dict[str, str]:
        """Environment of a fleet whose engines and trainer take these times."""
        paths = [str(Path(__file__).parent / "emulated"), str(ROOT), os.environ.get("PYTHONPATH")]
        return {
            **os.environ,
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            VARIABLE: json.dumps(asdict(self)),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }

    @classmethod
    def from_environment(cls) -> DeviceTimes:
        return cls(**json.loads(os.environ[VARIABLE]))
