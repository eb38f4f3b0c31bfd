"""Worker pools: workers that can replace one another. A pool is named "policy", "rollout" or
"scorer:NAME", and its workers policy-0, rollout-0, scorer-NAME-0 and so on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from paceline.errors import BadInput

if TYPE_CHECKING:
    from paceline.config.schema import Config

POLICY, ROLLOUT, SCORER = "policy", "rollout", "scorer"
ROLES = (POLICY, ROLLOUT, SCORER)
TRAINING = "training"  # In place of a pool: pairs that train, of those that share devices


def pool_of(role: str, scorer: str = "") -> str:
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
    return worker_id.rpartition("-")[0].replace("-", ":", 1)


def worker_index(worker_id: str) -> int:
    return int(worker_id.rpartition("-")[2])


def pair_of(config: Config, worker_id: str) -> int | None:
    """Number of the pair whose device the worker has in turn; None if it shares none. Scorers are
    dealt round to the pairs of [fleet]."""
    pool, scorer = pool_of_worker(worker_id), scorer_of(pool_of_worker(worker_id))
    if scorer in config.scorers.by_name and config.scorer_shares(scorer):
        return worker_index(worker_id) % config.fleet.policy
    return worker_index(worker_id) if config.takes_turns and pool in (POLICY, ROLLOUT) else None


def share_device(config: Config, worker_id: str, other: str) -> bool:
    pair = pair_of(config, worker_id)
    return worker_id == other or (pair is not None and pair == pair_of(config, other))


def seat_of(config: Config, worker_id: str, scorer: str = "") -> str:
    """Name of the seat at a device that a worker has in turn: one for policy replica N and rollout
    worker N, and one for each scorer beside them; empty for other workers, and without turns.
    ``scorer``: its name, if it is one. Raises BadInput if the worker's name does not tell."""
    if not config.takes_turns or (scorer and not config.scorer_shares(scorer)):
        return ""
    named = not scorer or pool_of_worker(worker_id) == pool_of(SCORER, scorer)
    if not (named and worker_id.rpartition("-")[2].isdecimal()):
        raise BadInput(
            f'--id {worker_id}: fleet.sharing = "{config.fleet.sharing}" pairs policy-N with '
            "rollout-N and scorer-NAME-N. Give a worker that you start yourself such a name"
        )
    pair = pair_of(config, worker_id)
    seat = "" if pair is None else f"seat-{pair}"
    return f"{seat}:{worker_id}" if scorer else seat


def desired_workers(config: Config) -> dict[str, int]:
    fleet = config.fleet
    scorers = {pool_of(SCORER, name): n for name, n in config.scorer_workers.items()}
    return {POLICY: fleet.policy, ROLLOUT: fleet.rollout, **scorers}


def limits_of(config: Config) -> dict[str, int]:
    """The limits of [fleet], and the planned workers of each scorer at the devices of pairs: more
    would find no memory there."""
    counts = config.scorer_workers.items()
    planned = {pool_of(SCORER, name): n for name, n in counts if config.scorer_shares(name)}
    return config.fleet.bounds | {f"{pool}_planned": n for pool, n in planned.items()}


def in_order(pools: Iterable[str]) -> list[str]:
    """Policy replicas first, then rollout workers, then scorers by name."""
    return sorted(pools, key=lambda pool: (ROLES.index(role_of(pool)), pool))
