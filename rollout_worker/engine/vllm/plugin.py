"""What vLLM loads in each of its processes: those that an engine of ours started end with it.

Found through the ``vllm.general_plugins`` entry point. vLLM's own children outlive a parent that is
killed, and on a GPU they keep its memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal

from paceline.process.parent_death_signal import die_with

MARK = "PACELINE_VLLM_ENGINE"
"""Environment variable that the engine sets for the processes it starts: other uses of vLLM in the
same Python environment are left alone."""


def register() -> None:
    """Called by vLLM, perhaps more than once in a process."""
    parent = multiprocessing.parent_process()
    if os.environ.get(MARK) and parent is not None and parent.pid is not None:
        die_with(parent.pid)
        # Ctrl-C reaches the whole process group; when to stop is the rollout worker's decision.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
