"""Test runner: how many tests run side by side, and its exit status if failures pass alone."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from tests import __main__ as runner

TERMINAL = "terminalreporter"


def status_of(alone: Mapping[str, int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit status of a run whose failures end with these statuses once each is run alone."""
    failed = [SimpleNamespace(nodeid=name) for name in alone]
    terminal = SimpleNamespace(stats={"failed": failed})
    manager = SimpleNamespace(get_plugin=lambda name: terminal if name == TERMINAL else None)
    config = SimpleNamespace(pluginmanager=manager, getoption=lambda _: 0)

    def main(words: list[str], plugins: list[Any]) -> pytest.ExitCode:
        for plugin in plugins:
            plugin.pytest_sessionfinish(SimpleNamespace(config=config))
        return pytest.ExitCode.TESTS_FAILED

    def again(command: list[str]) -> SimpleNamespace:
        return SimpleNamespace(returncode=alone[command[-1]])

    monkeypatch.setattr(pytest, "main", main)
    monkeypatch.setattr(subprocess, "run", again)
    return runner.run([])


@pytest.mark.parametrize("second", [pytest.ExitCode.TESTS_FAILED, -signal.SIGSEGV])
@pytest.mark.parametrize("first", [pytest.ExitCode.OK, -signal.SIGKILL])
def test_a_failure_that_fails_again_fails_the_run(
    first: int, second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status_of({"one": first, "two": second}, monkeypatch) != 0


def test_failures_that_pass_alone_do_not_fail_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert status_of({"one": 0, "two": 0}, monkeypatch) == 0


def test_many_failures_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {f"test {number}": 0 for number in range(runner.MOST_AGAIN + 1)}
    assert status_of(alone, monkeypatch) == pytest.ExitCode.TESTS_FAILED
