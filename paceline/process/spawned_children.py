"""Processes that a library spawns with multiprocessing: what they import first, and when they end.

Such a process imports the library before any of our modules. If extensions of torch are hidden in
the parent, they have to be hidden in the child before that: multiprocessing imports the parent's
main module first, so for a while that is this module.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.cuda_extensions import EXTENSIONS

VLLM_MARK = "PACELINE_VLLM_ENGINE"
"""Environment variable of vLLM's processes that end with the one that started them: other uses of
vLLM in the same Python environment are left alone (rollout_worker/engine/vllm/plugin.py)."""
_THIS = "paceline.process.spawned_children"


@contextmanager
def hidden_in_children() -> Iterator[None]:
    """Hides in children that are spawned inside what ``hide_cuda_extensions`` has hidden here, if
    it is anything. Objects of the main module cannot be handed to children inside."""
    main = sys.modules["__main__"]
    before = main.__spec__
    if any(sys.modules.get(name, main) is None for name in EXTENSIONS):
        main.__spec__ = importlib.util.find_spec(_THIS)
    try:
        yield
    finally:
        main.__spec__ = before
