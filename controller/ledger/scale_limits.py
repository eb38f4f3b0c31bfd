"""Limits of the desired counts of workers."""

from __future__ import annotations

from collections.abc import Mapping

from controller.ledger.enums import Role

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


def problem_of(bounds: Mapping[str, int], desired: Mapping[str, int]) -> str:
    """Why these counts are not allowed, with the limit; empty if they are."""
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
