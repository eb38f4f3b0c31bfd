"""Options of the test run."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# The default run is the same every time; HYPOTHESIS_PROFILE=default draws new examples.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=1000,
        help="seeded fault schedules that the simulator runs (default 1000)",
    )
