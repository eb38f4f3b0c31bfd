"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schedules",
        type=int,
        default=1000,
        help="seeded fault schedules that the simulator runs (default 1000)",
    )
