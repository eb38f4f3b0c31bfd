"""Worker pools: workers that can replace one another, and that are counted and scaled together.

The policy replicas are one pool and the rollout workers another; each scorer of the configuration
is one of its own. A pool's name is "policy", "rollout" or "scorer:NAME". Its workers are policy-0,
rollout-0, scorer-NAME-0 and so on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config.schema import Config

POLICY, ROLLOUT, SCORER = "policy", "rollout", "scorer"
ROLES = (POLICY, ROLLOUT, SCORER)


def pool_of(role: str, scorer: str = "") -> str:
    """Pool of a worker. ``scorer``: its name in the configuration, if it is one."""
    return f"{role}:{scorer}" if scorer else role


def role_of(pool: str) -> str:
    return pool.partition(":")[0]


def scorer_of(pool: str) -> str:
    """Name of the scorer; empty for another pool."""
    return pool.partition(":")[2]


def worker_name(pool: str, index: int) -> str:
    """Names of scorers contain no "-"."""
    return f"{pool.replace(':', '-')}-{index}"


def pool_of_worker(worker_id: str) -> str:
    """Pool of a name that ``worker_name`` made."""
    return worker_id.rpartition("-")[0].replace("-", ":", 1)


def worker_index(worker_id: str) -> int:
    """Number in a name that ``worker_name`` made."""
    return int(worker_id.rpartition("-")[2])


def desired_workers(config: Config) -> dict[str, int]:
    """Workers of each pool at the start of the run."""
    fleet = config.fleet
    scorers = {pool_of(SCORER, name): n for name, n in config.scorer_workers.items()}
    return {POLICY: fleet.policy, ROLLOUT: fleet.rollout, **scorers}


def in_order(pools: Iterable[str]) -> list[str]:
    """Policy replicas first, then rollout workers, then scorers by name."""
    return sorted(pools, key=lambda pool: (ROLES.index(role_of(pool)), pool))
