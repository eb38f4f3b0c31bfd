"""Training that takes the time of emulated GPUs: the gradients are real, what is left of the time
is waited for."""

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.scaling.device_times import DeviceTimes


def take_device_time(trainer: Any, times: DeviceTimes) -> None:
    """Makes ``add``, ``commit``, ``park`` and ``unpark`` of the class ``trainer`` take at least the
    times of ``times.policy_gpus`` GPUs."""
    take, add, commit = trainer.take, trainer.add, trainer.commit
    tokens: dict[Any, int] = {}
    """Tokens of each result of take()."""

    def counted_take(self: Any, accepted: Sequence[Any]) -> Any:
        taken = take(self, accepted)
        tokens[taken] = sum(sum(group.lengths) for group in accepted)
        return taken

    def timed_add(self: Any, taken: Any, last: bool = False) -> None:
        began = time.monotonic()
        add(self, taken, last)
        _wait_until(began + times.training_s(tokens.pop(taken), times.policy_gpus))

    def timed_commit(self: Any, version: Any, lr: float) -> None:
        began = time.monotonic()
        commit(self, version, lr)
        _wait_until(began + times.update_constant_s)

    def timed(switch: Any) -> Any:
        def timed_switch(self: Any) -> None:
            began = time.monotonic()
            switch(self)
            _wait_until(began + times.switch_s)

        return timed_switch

    trainer.take, trainer.add, trainer.commit = counted_take, timed_add, timed_commit
    trainer.park, trainer.unpark = timed(trainer.park), timed(trainer.unpark)


def _wait_until(deadline: float) -> None:
    time.sleep(max(0.0, deadline - time.monotonic()))
