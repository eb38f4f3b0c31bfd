"""Worker pools: names of workers, their roles and how many there are at the start."""

import pytest

from paceline import worker_pools
from tests.fixtures.configs import config_of


@pytest.mark.parametrize(
    ("role", "scorer", "pool", "worker"),
    [
        ("policy", "", "policy", "policy-3"),
        ("rollout", "", "rollout", "rollout-3"),
        ("scorer", "helpful", "scorer:helpful", "scorer-helpful-3"),
        ("scorer", "to_the_point", "scorer:to_the_point", "scorer-to_the_point-3"),
    ],
)
def test_a_workers_name_tells_its_pool(role: str, scorer: str, pool: str, worker: str) -> None:
    assert worker_pools.pool_of(role, scorer) == pool
    assert (worker_pools.role_of(pool), worker_pools.scorer_of(pool)) == (role, scorer)
    assert worker_pools.worker_name(pool, 3) == worker
    assert worker_pools.pool_of_worker(worker) == pool


@pytest.mark.parametrize(
    ("counts", "helpful", "short"), [(2, 2, 2), ({"helpful": 3}, 3, 1)], ids=["number", "table"]
)
def test_each_scorer_is_a_pool_of_its_own(counts: object, helpful: int, short: int) -> None:
    model = {"kind": "reward_model", "path": "/rm"}
    config = config_of(
        reward={"functions": ["scorer:helpful", "scorer:short"]},
        scorers={"short": model, "helpful": model},
        fleet={"policy": 1, "rollout": 4, "scorers": counts},
    )
    assert worker_pools.desired_workers(config) == {
        "policy": 1,
        "rollout": 4,
        "scorer:helpful": helpful,
        "scorer:short": short,
    }
    assert worker_pools.limits_of(config) == config.fleet.bounds


def test_scorers_at_devices_of_pairs_are_at_most_those_that_memory_was_planned_for() -> None:
    model = {"kind": "reward_model", "path": "/rm"}
    config = config_of(
        scorers={"here": model, "apart": model | {"takes_turns": False}},
        fleet={"sharing": "turns", "rollout": 1, "scorers": 2},
    )
    assert worker_pools.limits_of(config) == config.fleet.bounds | {"scorer:here_planned": 2}


def test_pools_are_in_order_of_roles_and_then_of_names() -> None:
    pools = ["scorer:b", "rollout", "scorer:a", "policy"]
    assert worker_pools.in_order(pools) == ["policy", "rollout", "scorer:a", "scorer:b"]
