"""Test runner of ``make test``, ``test-fast`` and ``test-long``: files of tests side by side on all
cores.

    python -m tests [pytest options]           all tests that are marked neither long nor slow
    python -m tests --long [pytest options]    those marked long: fleets, up to 2 minutes each
    python -m tests --all [pytest options]     both, in less time than one after the other
    python -m tests --fast [pytest options]    tests/unit without vLLM and heavy ones, 100 schedules
    python -m tests tests/process/rest -x      what is named, one test after the other

Fleets and processes often wait, for time-outs of their peers above all: two more workers than
there are cores keep the cores busy. Each worker imports all tests, with torch and transformers. The
long files come first, the short unit tests fill up the end. A file's tests stay together, because
they may share an engine or a Redis.

If a few tests fail beside others, each is run once more alone. Those that pass then are listed as
unsteady: a time limit was too short for the load, or an event was not awaited. Such a test is to be
mended too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import skips

BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
FAST = ("tests/unit", "--dist", "worksteal", "-k", "not vllm", "--schedules=100", "--durations=5")


MORE = 2
"""Workers beyond one a core: many tests wait for processes."""
MOST_AGAIN = 5
"""More failures than these are no accident of the load."""


def marked(marks: str) -> list[str]:
    return ["-m", marks, "-n", str(workers(MORE)), *BY_FILE]


def workers(more: int = 0) -> int:
    """Processes for tests: one a core and ``more``, and at most eight for the memory of torch."""
    return min(8, len(os.sched_getaffinity(0)) + more)


class Outcome:
    """Plugin that keeps what the end of a parallel run said."""

    failed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    """Reasons of skipped tests that CI may not skip."""
    whole: bool = True
    """No option ended the run at a failure: every test was run."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        terminal = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None:
            return
        failed = [*terminal.stats.get("failed", ()), *terminal.stats.get("error", ())]
        self.whole = not session.config.getoption("maxfail")
        self.failed = tuple(dict.fromkeys(report.nodeid for report in failed))
        reasons = map(skips.reason_of, terminal.stats.get("skipped", ()))
        self.refused = tuple(skips.refused_in_ci(reasons))


def run(words: list[str]) -> int:
    """Exit status of a parallel run; 0 too if its failures pass alone."""
    outcome = Outcome()
    status = int(pytest.main(words, plugins=[outcome]))
    few = outcome.whole and 0 < len(outcome.failed) <= MOST_AGAIN
    if status != pytest.ExitCode.TESTS_FAILED or not few or outcome.refused:
        return status
    print(f"{len(outcome.failed)} failed: each once more, alone", flush=True)
    alone = {
        name: subprocess.run([sys.executable, "-m", "pytest", "--durations=0", name]).returncode
        for name in outcome.failed
    }
    for name, again in alone.items():
        print(f"{'FAILED TWICE' if again else 'UNSTEADY, passed alone'}: {name}", flush=True)
    # A process that a signal ended has a negative status.
    return int(any(alone.values()))


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--fast", *more]:
            return run(["-m", "not slow and not heavy", "-n", str(workers()), *FAST, *more])
        case ["--long", *more]:
            return run([*marked("long and not slow"), *more])
        case ["--all", *more]:
            return run([*marked("not slow"), *more])
        case more if any(Path(word.partition("::")[0]).exists() for word in more):
            return int(pytest.main(["-m", "not slow", *more]))
    return run([*marked("not slow and not long"), *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
