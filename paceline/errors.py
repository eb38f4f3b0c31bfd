"""User errors, with a command's exit status; errors of the system that can pass; and the leader's
reasons to refuse a request.

A full disk, or a limit of descriptors, processes or memory, is nobody's bad input, and no run is
over because of it.
"""

import errno
import os
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from paceline.masking import masked


class UserError(Exception):
    """An error that a person can act on: one line without a traceback. 1: it failed."""

    exit_status = 1

    def __str__(self) -> str:
        return masked(super().__str__())


class BadInput(UserError):
    """The command line, a file or a setting is wrong."""

    exit_status = 2


class Unreachable(UserError):
    """No controller answers."""

    exit_status = 3


def one_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    try:
        message = masked(str(error)).strip().splitlines()
    except BaseException:  # a class of the user's may fail at this too
        message = ["its message cannot be read"]
    return f"{type(error).__name__}: {message[0] if message else 'no message'}"


REMEDIES = {
    errno.ENOSPC: "Free space on that disk",
    errno.EDQUOT: "Free space, or have the quota raised",
    errno.EMFILE: "Raise the limit of open files (ulimit -n, LimitNOFILE)",
    errno.ENFILE: "Raise fs.file-max, or end processes with many open files",
    errno.EAGAIN: "Raise the limit of processes (ulimit -u, pids.max of the container)",
    errno.ENOMEM: "End other processes, or give this machine or container more memory",
}
"""Remedies of what can pass, by the number of the error."""


def can_pass(error: BaseException) -> bool:
    """True also for an error that was raised because of one that can pass."""
    return bool(_number(error))


def _number(error: BaseException | None) -> int:
    """Number of the first error in the chain of causes that can pass; 0 for none."""
    if error is None:
        return 0
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return errno.EAGAIN  # as Python tells it of threads
    number = getattr(error, "errno", None)
    return number if number in REMEDIES else _number(error.__cause__ or error.__context__)


def in_words(error: BaseException, path: Path | None = None) -> str:
    """An error with its path and its remedy. ``path``: if the error names none."""
    number = getattr(error, "errno", None) or _number(error)
    place = getattr(error, "filename", None) or path
    remedy = REMEDIES.get(number, "")
    words = f"{os.strerror(number)}{f': {place}' if place else ''}"
    return f"{words}. {remedy}" if remedy else words


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "Did you mean exact_match? " for a name close to a known one; else empty."""
    import difflib

    close = difflib.get_close_matches(name, list(known), 1)
    return f"Did you mean {close[0]}? " if close else ""


def plural(count: int, noun: str) -> str:
    """ "1 controller", "2 policy replicas", "3 processes", "1,024 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def seen_from(path: str) -> str:
    """Suffix that names the directory of a relative ``path``; empty for an absolute one."""
    return "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"


class RefusalCode(StrEnum):
    FENCED = "fenced"  # the caller's incarnation is over or was never registered
    UNKNOWN = "unknown"  # the worker, run or payload that the request names does not exist
    INVALID = "invalid"  # the request can never be granted as it is
    STOPPED = "stopped"  # the run has ended
    CHANGED = "changed"  # conflict: the state that the caller saw is no longer the present one

    @property
    def grpc_status(self) -> str:
        """Name of the gRPC status that carries it; ``RequestRefused.code`` on the caller's side."""
        return _GRPC_STATUS.get(self, "FAILED_PRECONDITION")


_GRPC_STATUS = {RefusalCode.UNKNOWN: "NOT_FOUND", RefusalCode.INVALID: "INVALID_ARGUMENT"}
