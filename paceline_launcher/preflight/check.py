"""Check result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CORRECT = "Correct the setting that this line begins with"
"""The remedy for a finding that says what is wrong with a setting."""
FIRST_ROW = "first row"
"""Name of the check that shows the first row of recorded data."""
LENGTH = "run length"
"""Name of the check that says how many steps and samples a run has."""
Problem = tuple[str, str]
"""What is wrong, and the remedy."""


CheckState = Literal["ok", "warn", "fail", "skip"]
"""warn: it works, perhaps badly. fail: it will not work. skip: it is not checked here."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    state: CheckState
    found: str
    """Names the setting, if one is wrong."""
    remedy: str = ""

    def __str__(self) -> str:
        if not self.remedy:
            return self.found
        return f"{self.found}{'' if self.found.endswith(('.', '?')) else '.'} {self.remedy}"


def ok(name: str, found: str) -> Check:
    return Check(name, "ok", found)


def warn(name: str, found: str, remedy: str) -> Check:
    return Check(name, "warn", found, remedy)


def fail(name: str, found: str, remedy: str) -> Check:
    return Check(name, "fail", found, remedy)


def skip(name: str, why: str) -> Check:
    return Check(name, "skip", why)


def judge(name: str, found: str, remedy: str, *, warns: bool, fails: bool = False) -> Check:
    """A failure, else a warning, else ok. There is a remedy only if it is not ok."""
    if fails:
        return fail(name, found, remedy)
    return warn(name, found, remedy) if warns else ok(name, found)
