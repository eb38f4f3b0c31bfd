"""Guard of a promise, and the patch that takes it away."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULES = ("tests/unit/simulator/test_simulator.py", "--schedules=80")
"""Tests that run the simulator over 80 schedules."""


@dataclass(frozen=True, slots=True)
class Patch:
    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Guard:
    """Something a promise rests on, how to take it away, and the tests that must then fail."""

    name: str
    what: str
    patches: tuple[Patch, ...]
    tests: tuple[str, ...]
    choose: str = ""
    """Expression for pytest -k."""
