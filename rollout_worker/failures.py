"""Failures of one attempt at a task: the worker goes on, the task is returned with a reason."""

from paceline.process.structured_log import first_line


class AttemptFailed(Exception):
    """The attempt makes no group. ``reason``: what the ledger counts, for example reward_timeout. A
    failed attempt never becomes a reward of zero."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


OUT_OF_MEMORY = "out of memory"
_SIGNS = ("out of memory", "outofmemory", "allocate memory", "not enough memory", "no space left")
"""In the words of CUDA, of torch on a CPU, and of the kernel for memory that processes share."""


class NotLoaded(Exception):
    """The engine did not take weights that had come. The loader has counted that."""


def described(error: BaseException) -> str:
    """ "out of memory: tried to allocate 2 GiB"; the error's own words for any other one."""
    words = first_line(error)
    known = f"{type(error).__name__}: {words}".lower()
    lacking = isinstance(error, MemoryError) or any(sign in known for sign in _SIGNS)
    if not lacking or words.lower().startswith(OUT_OF_MEMORY):
        return words
    return f"{OUT_OF_MEMORY}: {words}"
