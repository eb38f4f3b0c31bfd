"""User errors: one hierarchy, each class with the exit status that a command ends with."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """An error that a person can act on: printed as one line, without a traceback.

    Exit status 1: the request failed or was refused.
    """

    exit_status = 1


class BadInput(UserError):
    """The command line, a file or a setting is wrong. Exit status 2."""

    exit_status = 2


class Unreachable(UserError):
    """No controller answers. Exit status 3."""

    exit_status = 3


def one_line(error: BaseException) -> str:
    """The error's class and the first line of its message."""
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0] if message else 'no message'}"


def seen_from(path: str) -> str:
    """The directory in which a relative ``path`` was looked for, for an error; empty for an
    absolute one."""
    return "" if Path(path).expanduser().is_absolute() else f" in {Path.cwd()}"
