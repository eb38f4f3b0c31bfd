"""Failures of one attempt at a task: the worker goes on, the task is returned with a reason."""

from __future__ import annotations


class AttemptFailed(Exception):
    """This attempt makes no group. ``reason``: what the ledger counts, for example reward_timeout.

    A failed attempt never becomes a reward of zero.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
