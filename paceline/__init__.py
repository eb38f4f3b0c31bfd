"""Paceline: asynchronous, fault-tolerant reinforcement learning for language models.

``paceline.start(config)`` starts a run on this machine, ``paceline.attach(run_dir)`` opens one that
runs or is over: docs/python.md.
"""

import importlib
import os
from typing import Any

from paceline.cuda_extensions import hide_cuda_extensions

# Here, because modules that import transformers or gRPC all import this package first.
hide_cuda_extensions()
# By default gRPC prints a line for each handshake that fails.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

_HANDLES = ("Rows", "RunFailed", "RunHandle", "attach", "start")


def __getattr__(name: str) -> Any:
    # By name: the launcher is above this package, and workers never need it.
    if name in _HANDLES:
        return getattr(importlib.import_module("paceline_launcher.run_handle"), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
