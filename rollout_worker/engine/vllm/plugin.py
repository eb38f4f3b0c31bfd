"""vLLM plugin that ends vLLM's processes together with the rollout worker that started them. vLLM
loads it in each of its processes through the ``vllm.general_plugins`` entry point. Without it,
children of a killed vLLM process live on, and on a GPU they keep its memory."""

import multiprocessing
import os
import signal

from paceline.cuda_extensions import VLLM_MARK
from paceline.process.lifetime import die_with


def register() -> None:
    """Called by vLLM, perhaps more than once in a process."""
    parent = multiprocessing.parent_process()
    if os.environ.get(VLLM_MARK) and parent is not None and parent.pid is not None:
        die_with(parent.pid)
        # Ctrl-C reaches the whole process group, but the rollout worker decides when to stop.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
