"""Training that takes the time of emulated GPUs: the gradients are real, what is left of the time is waited for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.scaling.device_times import DeviceTimes
from paceline.v1 import rollout_pb2

TOKEN_BYTES = 4


def take_device_time(trainer: Any, times: DeviceTimes) -> None:
    """Makes ``add`` and ``commit`` of the class ``trainer`` take at least the times of ``times.policy_gpus`` GPUs."""
    add, commit = trainer.add, trainer.commit

    def timed_add(self: Any, groups: Sequence[rollout_pb2.Group], last: bool = False) -> None:
        began = time.monotonic()
        add(self, groups, last)
        tokens = sum(len(c.tokens) // TOKEN_BYTES for group in groups for c in group.completions)
        _wait_until(began + times.training_s(tokens, times.policy_gpus))

    def timed_commit(self: Any, version: Any, lr: float) -> None:
        began = time.monotonic()
        commit(self, version, lr)
        _wait_until(began + times.update_constant_s)

    trainer.add, trainer.commit = timed_add, timed_commit


def _wait_until(deadline: float) -> None:
    time.sleep(max(0.0, deadline - time.monotonic()))
