"""Deadline of a check. What it reads may lie on a dead mount, and then never answers.

The reading goes on in a daemon thread that nobody waits for, so the command ends. (Only a thread in
a wait that not even SIGKILL ends, as below an NFS mount without ``intr`` on old kernels, would keep
it.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from paceline.errors import BadInput
from paceline.process.threads import call_within
from paceline_launcher.preflight.check import Check, fail

T = TypeVar("T")
ANSWER_S = 10.0
"""A disk or a file server that is alive answers a small read sooner."""
CHECK_MOUNT = "Check the mount or the disk behind it (ls it), or give another path"


class NoAnswer(BadInput):
    """What was read has not answered before its deadline."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}. {remedy}")
        self.found, self.remedy = found, remedy


def read_in_time(
    what: str, work: Callable[[], T], *, remedy: str = CHECK_MOUNT, limit_s: float | None = None
) -> T:
    """The result of ``work``, which reads ``what``: a setting and its path. Raises NoAnswer."""
    limit_s = ANSWER_S if limit_s is None else limit_s
    try:
        return call_within(limit_s, work, f"read {what}")
    except TimeoutError:
        raise NoAnswer(f"{what} does not answer within {limit_s:g} s", remedy) from None


def resolve_in_time(run_dir: Path) -> Path:
    """Raises NoAnswer if the file system of ``run_dir`` does not answer."""
    return read_in_time(f"--run-dir: {run_dir}", run_dir.resolve)


def checks_in_time(name: str, what: str, check: Callable[[], Iterable[Check]]) -> Iterator[Check]:
    """The results of ``check``, which reads ``what``; a failure of that ``name`` if it does not
    answer."""
    try:
        yield from read_in_time(what, lambda: list(check()))
    except NoAnswer as error:
        yield fail(name, error.found, error.remedy)
