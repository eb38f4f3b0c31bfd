"""Test runner of ``make test`` and ``make test-fast``: unit tests in parallel, the others one by one.

    python -m tests [pytest options]           tests/unit on all cores, then the rest serially
    python -m tests --fast [pytest options]    tests/unit without vLLM, and 100 fault schedules
    python -m tests tests/process/rest -x      what is named, serially

Tests of processes and fleets measure time-outs of real processes: beside one another they would
disturb each other. The closing line counts both parts; the exit status is that of the part that
failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

PARALLEL = ("tests/unit", "--dist", "worksteal")
SERIAL = ("tests/process", "tests/fleet")
FAST = ("-k", "not vllm", "--schedules=100", "--durations=5")
COUNTS_FILE = "PACELINE_TEST_COUNTS"
"""Environment variable: the file to which ``tests/conftest.py`` writes a part's outcomes."""


def workers() -> int:
    """Processes for unit tests: one a core, and at most eight for the memory of torch."""
    return min(8, len(os.sched_getaffinity(0)))


def run(counts: Counter[str], *arguments: str) -> int:
    """One run of pytest, whose outcomes are added to ``counts``; its exit status."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "counts.json"
        command = [sys.executable, "-m", "pytest", "-m", "not slow", *arguments]
        status = subprocess.run(command, env={**os.environ, COUNTS_FILE: str(file)}).returncode
        if file.exists():
            counts.update(json.loads(file.read_text()))
    return status


def closing_line(counts: Counter[str], took_s: float) -> str:
    order = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
    found = [f"{counts[name]} {name}" for name in order if counts[name]]
    return f" {', '.join(found) or 'no tests ran'} in {took_s:.0f}s ".center(80, "=")


def main(arguments: list[str]) -> int:
    began, counts = time.monotonic(), Counter[str]()
    parallel = (*PARALLEL, "-n", str(workers()))
    if arguments[:1] == ["--fast"]:
        parts: list[tuple[str, ...]] = [(*parallel, *FAST, *arguments[1:])]
    elif any(Path(word.partition("::")[0]).exists() for word in arguments):
        parts = [tuple(arguments)]
    else:
        parts = [(*parallel, *arguments), (*SERIAL, *arguments)]
    statuses = []
    for part in parts:
        statuses.append(run(counts, *part))
        failed = statuses[-1] not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if failed and (statuses[-1] != 1 or {"-x", "--exitfirst"} & set(arguments)):
            break
    if len(parts) > 1:
        print(closing_line(counts, time.monotonic() - began), flush=True)
    failures = [s for s in statuses if s not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)]
    if failures:
        return failures[0]
    return int(pytest.ExitCode.OK if 0 in statuses else pytest.ExitCode.NO_TESTS_COLLECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
