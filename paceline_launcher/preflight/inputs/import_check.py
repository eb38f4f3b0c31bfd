"""Import of what a run names, in a process of its own: what a user's module loads must not stay in
this one."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from paceline.process.user_code import python_module

LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Imported:
    problem: str
    """Why it cannot be used; empty if it can."""
    said: tuple[str, ...] = ()
    """Lines of its standard output."""


def import_check(check: str, name: str, *more: str, given: str = "") -> Imported:
    """``check``: a module of ours that imports what ``name`` says, reads ``given``, and fails with
    one line on standard error."""
    try:
        done = subprocess.run(
            [*python_module(check), name, *more],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT_S,
            input=given,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Imported(f"{name}: the import takes longer than {LIMIT_S:.0f} s")
    if done.returncode == 0:
        return Imported("", tuple(line for line in done.stdout.splitlines() if line.strip()))
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    if not lines:
        return Imported(f"{name}: its import ended the process with exit status {done.returncode}")
    return Imported(lines[-1].removeprefix("check: "))
