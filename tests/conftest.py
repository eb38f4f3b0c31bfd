"""Options of the test run, and its report of what was skipped."""

import gc
import os
import resource
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_timeout
from hypothesis import settings

from paceline.process.worker_command import without_collection
from testbed.patience import slowness
from tests.fixtures import skips
from tests.fixtures.shared import record_failure

# The default run is the same every time; HYPOTHESIS_PROFILE=default draws new examples.
settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture(autouse=True, scope="module")
def settings_of_the_process() -> Iterator[None]:
    """What a file's tests set for the whole process ends with them.

    vLLM in a process leaves LOCAL_WORLD_SIZE and LD_PRELOAD behind, and processes of later tests
    would inherit them. Roles and commands that run in a test set limits.
    """
    before, files = dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)
    switch_s, mask = sys.getswitchinterval(), os.umask(0o077)
    os.umask(mask)
    yield
    # Only what differs: threads of the process read the environment meanwhile.
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update({n: v for n, v in before.items() if os.environ.get(n) != v})
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    sys.setswitchinterval(switch_s)
    os.umask(mask)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for chats."""
    from tests.fixtures.chat_model import make_chat_model

    return make_chat_model(tmp_path_factory.mktemp("chat"))


MOST_PATIENCE = 3
"""Times its limit: then a test that hangs is cut off on any machine."""
LONGEST_FIRST = ("fleet", "process/vllm", "process/policy", "unit/simulator", "process", "unit")
"""Folders in the order in which they run: short tests then fill up the end of a parallel run."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Test modules import torch, transformers and more: see ``without_collection``."""
    with without_collection():
        return (yield)


def pytest_unconfigure() -> None:
    """What stays is collected at the end of the process: Triton would report it as leaked."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    items.sort(key=lambda i: [not i.path.is_relative_to(root / f) for f in LONGEST_FIRST])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=600,
        help="seeded fault schedules that the simulator runs (default 600)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> object:
    """A test may take longer if the machine is slower. This is decided once, at its start, so not
    without a bound."""
    mine = settings._replace(timeout=settings.timeout * min(slowness(), MOST_PATIENCE))
    return pytest_timeout.pytest_timeout_set_timer(item, mine)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    record_failure(item, report)
    return report


def _reports(config: pytest.Config, outcome: str) -> list[Any]:
    """Reports of ``outcome`` so far; none in a worker process of pytest-xdist."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    return list(terminal.stats.get(outcome, ())) if terminal is not None else []


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reasons = map(skips.reason_of, _reports(session.config, "skipped"))
    if exitstatus == pytest.ExitCode.OK and skips.refused_in_ci(reasons):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = [skips.reason_of(report) for report in _reports(config, "skipped")]
    if not reasons:
        return
    terminalreporter.section("skipped")
    for line in skips.summary(reasons):
        terminalreporter.line(line)
    for reason in sorted(set(skips.refused_in_ci(reasons))):
        terminalreporter.line(
            f"FAILED: continuous integration may not skip this: {reason}", red=True
        )
