"""Totals of a step's rewards in its plan, against the rewards themselves."""

import dataclasses

import numpy as np
import pytest

from controller.ledger.specs import GroupMeta
from controller.ledger.step_metrics import reward_totals
from paceline.payloads.group_limits import GroupLimits
from policy_worker.objectives.batch import StepTotals
from tests.fixtures.group_meta import accepted
from tests.fixtures.ledgers import Driven
from tests.fixtures.policy_models import make_group


def run_spec(rewards: list[list[float]]) -> list[GroupMeta]:
    groups = [make_group(f"t{n}", [1], [[2]] * len(r), r) for n, r in enumerate(rewards)]
    return [accepted(g, GroupLimits(len(g.completions), 10), 0) for g in groups]


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_they_are_those_of_all_rewards(offset: float) -> None:
    """Also of large rewards that are close to one another."""
    rewards = [[offset + r for r in group] for group in ([1, 0, 0.5], [1, 1], [0.2], [2, -1, 0, 0])]
    found = reward_totals(run_spec(rewards))
    everything = np.concatenate(rewards)
    within = np.concatenate([np.array(g) - np.mean(g) for g in rewards])
    totals = StepTotals(
        step=1,  # type: ignore[arg-type]
        version=0,  # type: ignore[arg-type]
        tokens=1,
        sequences=1,
        samples=found.samples,
        reward_sum=found.total,
        reward_squares=found.squares,
        within_squares=found.within,
    )
    assert totals.samples == 10
    assert totals.reward_mean == pytest.approx(everything.mean(), rel=1e-12)
    assert totals.reward_std == pytest.approx(everything.std(ddof=1), rel=1e-6)
    assert totals.within_std == pytest.approx(np.sqrt((within**2).sum() / 9), rel=1e-6)


def test_every_replica_gets_the_same_bits_in_whatever_order_groups_are() -> None:
    generator = np.random.default_rng(0)
    groups = run_spec(generator.normal(size=(40, 5)).tolist())
    assert reward_totals(groups) == reward_totals(groups[::-1])
    assert dataclasses.astuple(reward_totals(groups[3:] + groups[:3])) == dataclasses.astuple(
        reward_totals(groups)
    )


def test_a_step_without_groups_has_none() -> None:
    assert dataclasses.astuple(reward_totals([])) == (0, 0.0, 0.0, 0.0)


def test_the_plan_brings_them_to_the_trainer_also_after_a_failover() -> None:
    run = Driven.fleet("p0", "r0", groups_per_step=2)
    for reward in (0.5, 1.5):
        (lease,) = run.lease("r0").leases
        run.submit("r0", lease, 0, reward_mean=reward, reward_std=0.25)
    for _ in range(2):
        totals = StepTotals.of(run.ask("p0")[1])
        assert (totals.samples, totals.reward_sum) == (4, 4.0)
        assert totals.reward_squares == 2 * 0.25**2 + 4 * 0.5**2
        assert totals.within_squares == 2 * 0.25**2
        run.failover()
