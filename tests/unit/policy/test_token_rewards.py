"""Rewards of tokens and turns: advantages against loops written from the papers, whatever batch a
group is in."""

import math

import numpy as np
import pytest

from policy_worker.objectives.batch import BadGroup
from policy_worker.objectives.grpo import Grpo
from policy_worker.rows.group_reading import ModelLimits, check_values, decode
from policy_worker.toy_step import totals_of
from tests.fixtures.policy_models import make_config, make_group

EPSILON = 1e-4


def with_steps(name, rewards, lengths, steps):
    """``steps``: of each completion, {token: reward}."""
    fresh = [[(5, n)] for n in lengths]
    group = make_group(name, [1], [[2] * n for n in lengths], rewards, versions=fresh)
    for completion, found in zip(group.completions, steps, strict=True):
        for token, reward in found.items():
            completion.token_rewards.add(token=token, reward=reward)
    return group


def groups():
    return [
        with_steps(
            "t0",
            [1.5, 0.25, -0.5],
            [4, 2, 5],
            [{1: 0.5, 3: 0.0}, {1: 0.25}, {0: -0.5, 2: 1.0, 4: -1.0}],
        ),
        make_group("t1", [1], [[2], [3, 4], [5]], [1.0, 0.0, 0.5]),
        with_steps("t2", [2.0, 2.0, 2.0], [2, 2, 3], [{0: 1.0}, {1: 1.0}, {0: 1.0, 2: 1.0}]),
    ]


def deviation(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))


def process_supervision(group, *, normalise, leave_one_out=False):
    """DeepSeekMath, section 4.1.3, for each token; and the outcome's advantage, of what is left of
    the reward."""
    left, steps = [], []
    for c in group.completions:
        mine = {r.token: r.reward for r in c.token_rewards}
        left.append(c.reward - sum(mine.values()))
        steps.append(mine)
    everything = [r for mine in steps for r in mine.values()]
    found = []
    for i, c in enumerate(group.completions):
        n = len(left)
        others = (sum(left) - left[i]) / (n - 1) if leave_one_out else sum(left) / n
        outcome = (left[i] - others) / (deviation(left) + EPSILON if normalise else 1.0)
        for t in range(len(c.tokens) // 4):
            total = 0.0
            for token, reward in steps[i].items():
                if token >= t:
                    centred = reward - sum(everything) / len(everything)
                    total += centred / (deviation(everything) + EPSILON if normalise else 1.0)
            found.append(outcome + total)
    return found


def advantages(batch, totals, **train):
    config = make_config(train=train)
    return Grpo(config).advantages(decode(batch), totals)


@pytest.mark.parametrize(
    ("normalise", "leave_one_out"), [(True, False), (False, False), (False, True)]
)
def test_process_supervision_is_as_published(normalise, leave_one_out):
    train = {
        "advantage": "leave_one_out" if leave_one_out else "group",
        "advantage_norm": normalise,
    }
    batch = groups()
    found = advantages(batch, totals_of(batch), **train)
    wanted = [
        value
        for group in batch
        for value in process_supervision(group, normalise=normalise, leave_one_out=leave_one_out)
    ]
    np.testing.assert_allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("kind", ["step", "group_step"])
def test_of_a_step_it_is_the_reward_to_go(kind, normalise):
    batch = groups()
    found = advantages(batch, totals_of(batch), advantage=kind, advantage_norm=normalise)
    rewards = [c.reward for g in batch for c in g.completions]
    within = []
    for g in batch:
        mean = sum(c.reward for c in g.completions) / len(g.completions)
        within += [c.reward - mean for c in g.completions]
    wanted, s = [], 0
    for g in batch:
        for c in g.completions:
            base = sum(rewards) / len(rewards) if kind == "step" else c.reward - within[s]
            scale = deviation(rewards if kind == "step" else within) + EPSILON if normalise else 1.0
            for t in range(len(c.tokens) // 4):
                gone = sum(r.reward for r in c.token_rewards if r.token < t)
                wanted.append((c.reward - gone - base) / scale)
            s += 1
    np.testing.assert_allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize("kind", ["group", "leave_one_out", "step", "group_step"])
def test_a_groups_advantages_are_the_same_bits_in_any_batch(kind):
    batch = groups()
    totals = totals_of(batch)
    train = {"advantage": kind, "advantage_norm": kind != "leave_one_out"}
    config = make_config(train=train)
    together = Grpo(config).columns(decode(batch), totals).advantage
    alone = [Grpo(config).columns(decode([g]), totals).advantage for g in reversed(batch)]
    np.testing.assert_array_equal(together, np.concatenate(alone[::-1]))


def test_equal_steps_and_equal_outcomes_teach_nothing():
    """0.1 + 0.2 is not 0.3: what is left of the rewards are rounding errors, and no outcomes."""
    batch = [with_steps("t0", [0.1 + 0.2, 0.3, 0.3], [2, 2, 2], [{0: 0.1, 1: 0.2}] * 3)]
    found = advantages(batch, totals_of(batch)).reshape(3, 2)
    np.testing.assert_allclose(found - found[0], 0.0, atol=1e-9)


def test_a_sequence_of_which_only_a_turn_has_an_advantage_is_trained():
    batch = [with_steps("t0", [1.0, 1.0], [3, 2], [{0: 1.0}, {1: 1.0, 0: 0.0}])]
    batch[0].completions[1].ClearField("token_rewards")
    objective = Grpo(make_config(train={"advantage_norm": False}))
    decoded = decode(batch)
    columns = objective.columns(decoded, totals_of(batch))
    assert columns.advantage.tolist() == [-0.5, -0.5, -0.5, 0.5, 0.5]
    assert objective.contributing(decoded, columns).tolist() == [True, True]


def test_truncated_completions_give_no_gradient_and_count_in_the_totals():
    batch = [with_steps("t0", [1.0, 0.0, 0.5], [2, 1, 1], [{}, {}, {}])]
    batch[0].completions[0].finish_reason = 2
    plain, filtered = (Grpo(make_config(train={"overlong_filter": on})) for on in (False, True))
    decoded, totals = decode(batch), totals_of(batch)
    before, after = (o.columns(decoded, totals) for o in (plain, filtered))
    assert after.weight.tolist() == [0.0, 0.0, *before.weight[2:].tolist()]
    np.testing.assert_array_equal(after.advantage, before.advantage)
    assert filtered.contributing(decoded, after).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("steps", "words"), [({4: 1.0}, "token rewards"), ({0: math.nan}, "finite")]
)
def test_a_payload_with_rewards_of_no_token_is_named(steps, words):
    group = with_steps("t0", [1.0, 0.0], [2, 2], [steps, {}])
    with pytest.raises(BadGroup, match=f"group t0: .*{words}"):
        check_values(decode([group]), [group], ModelLimits(vocabulary=10))
