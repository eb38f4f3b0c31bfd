"""Emulated devices in the workers of a fleet: the engine is replaced, and training takes its device
time.

It is loaded by way of PYTHONPATH. ``PACELINE_EMULATED`` holds the times; see
``benchmarks/scaling/device_times.py``.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def emulate_engine(module: Any) -> None:
    def make_engine(config: Any, tokenizer: Any) -> Any:
        from benchmarks.scaling.device_times import DeviceTimes
        from benchmarks.scaling.emulated_engine import EmulatedEngine

        return EmulatedEngine.of(config, tokenizer, DeviceTimes.from_environment())

    module.make_engine = make_engine


def emulate_training(module: Any) -> None:
    from benchmarks.scaling.device_times import DeviceTimes
    from benchmarks.scaling.emulated_training import take_device_time

    take_device_time(module.Trainer, DeviceTimes.from_environment())


EMULATED: dict[str, Callable[[Any], None]] = {
    "rollout_worker.engine.choice": emulate_engine,
    "policy_worker.trainer": emulate_training,
}


class Loader(importlib.machinery.SourceFileLoader):
    """Changes a module once it is executed: at the start of the interpreter it is too early for
    torch."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        EMULATED[self.name](module)


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in EMULATED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(name, spec.origin)
        return spec


if "PACELINE_EMULATED" in os.environ:
    sys.meta_path.insert(0, Finder())
