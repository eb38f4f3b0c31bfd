"""List of all faults, in the order of the table."""

from __future__ import annotations

from benchmarks.recovery import controllers, policies, redis_servers, rollouts, supervisors
from benchmarks.recovery.case import Case

CASES: dict[str, Case] = {
    **controllers.CASES,
    **redis_servers.CASES,
    **policies.CASES,
    **rollouts.CASES,
    **supervisors.CASES,
}
