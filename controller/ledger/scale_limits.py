"""Limits of the desired counts of workers."""

from __future__ import annotations

from collections.abc import Mapping

from controller.ledger.commands import CommandRefused
from controller.ledger.enums import Role
from paceline.refusal_code import RefusalCode

MOST_WORKERS = 10_000


def bounds_of(bounds: Mapping[str, int], role: str) -> tuple[int, int]:
    """(least, most) desired workers of ``role``."""
    return bounds.get(f"{role}_min", 1), bounds.get(f"{role}_max", MOST_WORKERS)


def within(bounds: Mapping[str, int], desired: Mapping[str, int]) -> dict[str, int]:
    """``desired`` with every count moved to the nearest allowed one."""
    allowed = {}
    for role, count in desired.items():
        least, most = bounds_of(bounds, role)
        allowed[role] = min(max(count, least), most)
    return allowed


def check_desired(bounds: Mapping[str, int], desired: Mapping[str, int]) -> None:
    """Raises CommandRefused, with the limit in its message, if a count is not allowed."""
    problem = _problem(bounds, desired)
    if problem:
        raise CommandRefused(RefusalCode.INVALID, problem)


def _problem(bounds: Mapping[str, int], desired: Mapping[str, int]) -> str:
    roles = [str(role) for role in Role]
    for role, count in desired.items():
        if role not in roles:
            return f"there is no role {role!r}: one of {', '.join(roles)}"
        if not 1 <= count <= MOST_WORKERS:
            return f"{role}={count}: at least 1, at most {MOST_WORKERS}"
        least, most = bounds_of(bounds, role)
        if count < least:
            return f"{role}={count} is below fleet.{role}_min = {least}"
        if count > most:
            return f"{role}={count} is above fleet.{role}_max = {most}"
    return "" if desired else "no count given: policy=N, rollout=N"
