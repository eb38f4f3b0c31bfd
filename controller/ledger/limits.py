"""Limits of the desired counts of workers, which are by pool: see paceline/worker_pools.py."""

from collections.abc import Iterable, Mapping

from controller.ledger.enums import Role
from paceline.worker_pools import role_of

MOST_WORKERS = 10_000


def bounds_of(bounds: Mapping[str, int], pool: str) -> tuple[int, int]:
    """(least, most) desired workers of ``pool``."""
    name, planned = setting_of(pool), bounds.get(f"{pool}_planned", MOST_WORKERS)
    return bounds.get(f"{name}_min", 1), min(planned, bounds.get(f"{name}_max", MOST_WORKERS))


def setting_of(pool: str) -> str:
    """Name of the setting in [fleet] that has the desired number of ``pool``."""
    return "scorers" if role_of(pool) == Role.SCORER else role_of(pool)


def within(bounds: Mapping[str, int], desired: Mapping[str, int]) -> dict[str, int]:
    """``desired`` with every count moved to the nearest allowed one."""
    allowed = {}
    for pool, count in desired.items():
        least, most = bounds_of(bounds, pool)
        allowed[pool] = min(max(count, least), most)
    return allowed


def problem_of(bounds: Mapping[str, int], desired: Mapping[str, int], pools: Iterable[str]) -> str:
    """Reason why these counts are not allowed, with the limit; empty if they are."""
    known = sorted({str(role) for role in (Role.POLICY, Role.ROLLOUT)} | set(pools))
    for pool, count in desired.items():
        if pool not in known:
            return f"there is no role {pool!r}: one of {', '.join(known)}"
        if not 1 <= count <= MOST_WORKERS:
            return f"{pool}={count}: at least 1, at most {MOST_WORKERS}"
        if count > (planned := bounds.get(f"{pool}_planned", count)):
            return (
                f"{pool}={count}: the memory of the devices that its workers share with pairs was "
                f"planned for {planned}. For more, raise fleet.scorers and start again, or give "
                "them devices of their own (takes_turns = false)"
            )
        least, most = bounds_of(bounds, pool)
        if count < least:
            return f"{pool}={count} is below fleet.{setting_of(pool)}_min = {least}"
        if count > most:
            return f"{pool}={count} is above fleet.{setting_of(pool)}_max = {most}"
    return "" if desired else "no count given: policy=N, rollout=N"


def dispatch_limit(served_step: float, max_staleness: float, groups_per_step: int) -> int:
    """Groups that may have been dispatched in all, whether trained, ready or leased, while engines
    serve the weights after ``served_step`` steps. A further group could only train in a step that
    is more than ``max_staleness`` later."""
    return int((served_step + max_staleness + 1) * groups_per_step)
