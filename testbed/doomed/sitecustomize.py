"""Groups that no trainer of a fleet under test survives, or whose rows do not fit into its memory.

It is loaded by way of PYTHONPATH. ``PACELINE_DOOMED`` is a JSON object: the fate (kill, memory,
follower_memory: of ranks above 0 only) by task id.
"""

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

MODULE = "policy_worker.step.gradients"


class Loader(importlib.machinery.SourceFileLoader):
    """Changes the module once it is executed: at the start of the interpreter it is too early for
    torch."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        doom(module.Gradients, json.loads(os.environ["PACELINE_DOOMED"]))


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = Loader(name, spec.origin)
        return spec


def doom(gradients: Any, fates: Mapping[str, str]) -> None:
    import torch

    add_share, add_row = gradients.add_share, gradients._add_row

    def doomed_add_share(self: Any, share: Any, *arguments: Any, **named: Any) -> None:
        met = {fates.get(task_id) for task_id, _ in share.keys}
        if "kill" in met:
            os.kill(os.getpid(), signal.SIGKILL)
        self.too_large = "memory" in met or ("follower_memory" in met and self.replica.rank > 0)
        add_share(self, share, *arguments, **named)

    def doomed_row(self: Any, *arguments: Any, **named: Any) -> None:
        if self.too_large:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")
        add_row(self, *arguments, **named)

    gradients.add_share, gradients._add_row = doomed_add_share, doomed_row


if "PACELINE_DOOMED" in os.environ:
    sys.meta_path.insert(0, Finder())
