"""Failures of one attempt at a task: the worker goes on, the task is returned with a reason."""

from __future__ import annotations


class AttemptFailed(Exception):
    """This attempt makes no group. ``reason``: what the ledger counts, for example reward_timeout.

    A failed attempt never becomes a reward of zero.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def one_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0] if message else 'no message'}"
