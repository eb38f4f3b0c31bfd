"""Emulated devices in the workers of a fleet: the engine is replaced, and training takes its device
time.

It is loaded by way of PYTHONPATH. ``PACELINE_EMULATED`` holds the times; see
``benchmarks/scaling/device_times.py``.
"""

import importlib.abc
import importlib.machinery
import os
import sys


def emulate_engine(module):
    def make_engine(config, tokenizer):
        from benchmarks.scaling.device_times import DeviceTimes
        from benchmarks.scaling.emulated_engine import EmulatedEngine

        return EmulatedEngine.of(config, tokenizer, DeviceTimes.from_environment())

    module.make_engine = make_engine


def emulate_training(module):
    from benchmarks.scaling.device_times import DeviceTimes
    from benchmarks.scaling.emulated_training import take_device_time

    take_device_time(module.Trainer, DeviceTimes.from_environment())


EMULATED = {"rollout_worker.engine": emulate_engine, "policy_worker.trainer": emulate_training}


class Finder(importlib.abc.MetaPathFinder):
    """Changes a module once it is executed: at the start of the interpreter it is too early for
    torch."""

    def find_spec(self, name, path=None, target=None):
        if name not in EMULATED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            EMULATED[name](module)

        spec.loader.exec_module = exec_module
        return spec


if "PACELINE_EMULATED" in os.environ:
    sys.meta_path.insert(0, Finder())
