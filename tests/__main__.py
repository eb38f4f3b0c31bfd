"""Test runner of ``make test`` and ``make test-fast``: files of tests side by side on all cores.

    python -m tests [pytest options]           all tests that are not marked slow
    python -m tests --fast [pytest options]    tests/unit without vLLM, and 100 fault schedules
    python -m tests tests/process/rest -x      what is named, one test after the other

Fleets and processes mostly wait, for time-outs of their peers above all: one more worker than
there are cores keeps the cores busy. The long files come first, the short unit tests fill up the
end. A file's tests stay together, because they may share an engine or a Redis.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
FAST = ("tests/unit", "--dist", "worksteal", "-k", "not vllm", "--schedules=100", "--durations=5")


def workers(more: int = 0) -> int:
    """Processes for tests: one a core and ``more``, and at most eight for the memory of torch."""
    return min(8, len(os.sched_getaffinity(0)) + more)


def main(arguments: list[str]) -> int:
    words = ["-m", "not slow"]
    if arguments[:1] == ["--fast"]:
        words += ["-n", str(workers()), *FAST, *arguments[1:]]
    elif any(Path(word.partition("::")[0]).exists() for word in arguments):
        words += arguments
    else:
        words += ["-n", str(workers(more=1)), *BY_FILE, *arguments]
    return int(pytest.main(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
