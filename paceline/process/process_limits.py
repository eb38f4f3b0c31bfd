"""Limits of a process of any role: open files, and the mode of the files it makes."""

from __future__ import annotations

import os
import resource

MOST_FILES = 1 << 20
"""Containers may allow a billion, and some libraries walk through all of them."""
PRIVATE = 0o077


def set_process_limits() -> None:
    """Raises the soft limit of open files to the hard one, and makes new files private.

    Every connection is an open file. The usual soft limit of 1,024 is there for programs that call
    ``select``; a fleet of 1,000 workers, or a stranger with idle connections, would use it up.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    # Journal, prompts, samples and configuration: a usual umask would show them to every user.
    os.umask(os.umask(PRIVATE) | PRIVATE)


def open_files_limit() -> int:
    """Soft limit of open files of this process, at most ``MOST_FILES``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)
