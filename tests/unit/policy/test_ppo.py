"""PPO: advantages, value targets, losses and gradients against loops over tokens as the papers
write them."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from paceline.config.sections.objective_options import PpoOptions
from policy_worker.objectives.batch import StepTotals
from policy_worker.objectives.columns import TokenColumns, TokenScores, token_weights
from policy_worker.objectives.load import load_objective
from policy_worker.objectives.ppo import Ppo, RunningMoments, adapted, gae
from policy_worker.ranks.sliced_weights import SlicedWeights
from policy_worker.rows.group_reading import decode
from policy_worker.trainer import Trainer
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config, make_group, random_groups
from tests.fixtures.train_states import all_bits, assert_same_bits
from tests.fixtures.training_steps import CPU, form_alone, train_step

LENGTHS = np.array([3, 1, 6, 2, 4])
TRAINED = np.array([1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0], np.float64)
"""Tokens of an environment in the middle, at the start and at the end of completions."""
SEQUENCE = np.repeat(np.arange(len(LENGTHS)), LENGTHS)


def ppo_config(train=None, **options):
    settings = {"algorithm": "ppo", **(train or {})}
    return make_config(train=settings, objective=options)


def draw(seed, dtype=torch.float64):
    """Columns of five completions with rewards of tokens, log-probs, values, and both before the
    step."""
    rng = np.random.default_rng(seed)
    n = int(LENGTHS.sum())

    def normal(scale=1.0):
        return torch.tensor(scale * rng.standard_normal(n), dtype=dtype)

    behaviour = -2.0 + 0.3 * normal().clamp(-2, 2)
    weight = token_weights(TRAINED.astype(np.float32), LENGTHS, 20, 8, make_config())
    columns = TokenColumns(
        behaviour=behaviour,
        advantage=normal() * torch.tensor(TRAINED),
        weight=torch.tensor(weight, dtype=dtype),
        trained=torch.tensor(TRAINED, dtype=dtype),
        staleness=torch.zeros(n, dtype=dtype),
        sequence_of=torch.tensor(SEQUENCE),
        sequences=len(LENGTHS),
        reference=behaviour + normal(0.2),
    )
    return columns, behaviour + normal(0.3), normal(), normal(0.3)


def advantages_by_hand(rewards, values, gamma, lam):
    """Equation 16 of arXiv 1506.02438 as the double sum that it is, over the tokens of the model
    only."""
    advantages = np.zeros(len(rewards))
    for s in range(len(LENGTHS)):
        inside = [i for i in range(len(rewards)) if SEQUENCE[i] == s and TRAINED[i]]
        for t in range(len(inside)):
            for k in range(t, len(inside)):
                following = values[inside[k + 1]] if k + 1 < len(inside) else 0.0
                delta = rewards[inside[k]] + gamma * following - values[inside[k]]
                advantages[inside[t]] += (gamma * lam) ** (k - t) * delta
    return advantages


@pytest.mark.parametrize("trained", [1.0, 0.0])
def test_a_thousand_tokens_are_summed_to_their_end_and_untrained_ones_are_zero(trained):
    rewards = torch.zeros(1000)
    rewards[-1] = 1.0
    columns = torch.zeros(1000), torch.full((1000,), trained), torch.zeros(1000, dtype=torch.int64)
    found, returns = gae(rewards, *columns, gamma=1, lam=1)
    assert found.tolist() == returns.tolist() == [trained] * 1000


def loss_by_hand(config, columns, logprobs, before, values, old, scalars):
    """Token by token. Returns the loss and its slopes by log-prob and value."""
    o, t = PpoOptions(**config.objective.options), config.train.loss
    gamma, lam, clip, coef = o.gamma, o.gae_lambda, o.value_clip, o.value_coef
    beta = scalars.get("kl_coef", t.kl_coef)
    n = len(logprobs)
    rewards = [
        columns.advantage[i].item()
        - (beta * (before[i] - columns.reference[i]).item() * TRAINED[i] if beta else 0.0)
        for i in range(n)
    ]
    if o.whiten_rewards:
        mean, std = (
            scalars["reward_mean"],
            math.sqrt(scalars["reward_squares"] / scalars["reward_weight"]),
        )
        rewards = [((r - mean) / std + mean) * TRAINED[i] for i, r in enumerate(rewards)]
    advantages = advantages_by_hand(rewards, old.tolist(), gamma, lam)
    returns = advantages + old.numpy()
    if o.whiten_advantages:
        std = math.sqrt(scalars["advantage_squares"] / scalars["advantage_weight"])
        advantages = (advantages - scalars["advantage_mean"]) / std
    total, by_logprob, by_value = 0.0, np.zeros(n), np.zeros(n)
    for i in range(n):
        w, a = columns.weight[i].item(), advantages[i]
        r = math.exp(logprobs[i].item() - columns.behaviour[i].item())
        bounded = min(max(r, 1 - t.clip_low), 1 + t.clip_high)
        j, slope = (r * a, r * a) if r * a <= bounded * a else (bounded * a, 0.0)
        if a < 0 and t.dual_clip is not None and j < t.dual_clip * a:
            j, slope = t.dual_clip * a, 0.0
        total -= w * j
        by_logprob[i] = -w * slope
        v, target = values[i].item(), returns[i]
        loss, slope = (v - target) ** 2, 2 * (v - target)
        if clip is not None:
            held = min(max(v, old[i].item() - clip), old[i].item() + clip)
            if (held - target) ** 2 > loss:
                loss, slope = (held - target) ** 2, 0.0
        total += coef * w * 0.5 * loss
        by_value[i] = coef * w * 0.5 * slope
    return total, by_logprob, by_value


MOMENTS = {
    "advantage_weight": 40.0,
    "advantage_mean": 0.3,
    "advantage_squares": 90.0,
    "reward_weight": 40.0,
    "reward_mean": -0.2,
    "reward_squares": 10.0,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("train", "options"),
    [
        ({}, {"whiten_advantages": False}),
        ({}, {"gae_lambda": 0.0}),
        ({}, {"gamma": 0.5, "gae_lambda": 1.0}),
        ({"kl_coef": 0.1}, {"gamma": 0.9, "gae_lambda": 0.5, "value_coef": 0.3}),
        ({"kl_coef": 0.1}, {"kl_controller": "adaptive", "value_clip": "none"}),
        ({"kl_coef": 0.2}, {"whiten_rewards": True, "value_clip": 0.05}),
        ({"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.1}, {"whiten_advantages": False}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_loss_and_its_gradients_are_those_of_a_loop_over_tokens(dtype, train, options, seed):
    columns, logprobs, old, shift = draw(seed, dtype)
    if "kl_coef" not in train:
        columns = dataclasses.replace(columns, reference=None)
    config = ppo_config(train, **options)
    objective = load_objective(config)
    scalars = {**objective.scalars, **MOMENTS, "kl_coef": 0.25}
    scalars = {name: scalars[name] for name in objective.scalars}
    before, values = logprobs + 0.02, old + shift
    leaves = [logprobs.clone().requires_grad_(), values.clone().requires_grad_()]
    scores = TokenScores(
        leaves[0],
        torch.zeros_like(old),
        before,
        {"critic": leaves[1]},
        {"critic": old},
        scalars,
    )
    found = objective.loss(scores, columns)
    found.total.backward()
    total, by_logprob, by_value = loss_by_hand(
        config, columns, logprobs, before, values, old, scalars
    )
    assert float(found.total.detach()) == pytest.approx(total, abs=1e-5)
    np.testing.assert_allclose(leaves[0].grad, by_logprob, atol=1e-5)
    np.testing.assert_allclose(leaves[1].grad, by_value, atol=1e-5)


def test_a_step_that_makes_one_update_is_never_stopped_by_the_value_clip():
    """V is the value before the step in its value: the gradient is that of the squared error, ties
    included."""
    columns, logprobs, old, _ = draw(0)
    columns = dataclasses.replace(columns, reference=None)
    gradients = []
    for clip in (0.2, "none"):
        objective = load_objective(ppo_config(value_clip=clip))
        value = old.clone().requires_grad_()
        scores = TokenScores(
            logprobs, logprobs, logprobs, {"critic": value}, {"critic": old}, objective.scalars
        )
        objective.loss(scores, columns).total.backward()
        gradients.append(value.grad)
    assert torch.equal(*gradients)


def rewards_of(batch):
    return Ppo(ppo_config()).advantages(batch, StepTotals(1, 0, 1, 1)).tolist()


def test_rewards_of_tokens_stay_where_they_are_and_those_of_others_go_to_the_model_before_them():
    masks = [[0, 1, 0, 1, 0], [1, 0], [0, 0]]
    tokens = [[3, 4, 5, 6, 7], [8, 9], [3, 4]]
    group = make_group("t0", [1, 2], tokens, [10.0, 1.0, 5.0], masks=masks)
    for completion, own in zip(
        group.completions, [{0: 1.0, 1: 2.0, 2: 4.0, 4: 0.5}, {1: 3.0}, {0: 1.0}], strict=True
    ):
        for token, reward in own.items():
            completion.token_rewards.add(token=token, reward=reward)
    # 10 = 7.5 of tokens, and 2.5 at the end. The second lost 2 at its end. The third has no token
    # of the model.
    assert rewards_of(decode([group])) == [0, 1 + 2 + 4, 0, 0.5 + 2.5, 0, 3 - 2, 0, 0, 0]


# ---- numbers of the state


@pytest.mark.parametrize("decay", [0.0, 0.9])
def test_running_moments_are_those_of_all_values_weighted_by_age(decay):
    moments = RunningMoments("x", decay)
    scalars, seen = moments.start, []
    rng = np.random.default_rng(3)
    for step in range(5):
        values = 100.0 + (step + 1) * rng.standard_normal(50)
        mask = (rng.random(50) > 0.3).astype(np.float64)
        # In two rows, of two replicas.
        rows = [
            moments.sums(torch.tensor(v), torch.tensor(m), scalars)
            for v, m in zip(np.split(values, 2), np.split(mask, 2), strict=True)
        ]
        sums = {name: float(sum(row[name] for row in rows)) for name in moments.summed}
        scalars = moments.advance(scalars, sums)
        seen.append(values[mask > 0])
        ages = [decay ** (len(seen) - 1 - i) for i in range(len(seen))]
        weights = np.concatenate([np.full(len(v), a) for v, a in zip(seen, ages, strict=True)])
        mean = np.average(np.concatenate(seen), weights=weights)
        std = math.sqrt(np.average((np.concatenate(seen) - mean) ** 2, weights=weights))
        assert moments.of(scalars) == pytest.approx((mean, std), rel=1e-9)


def test_moments_before_the_first_step_and_of_equal_values_are_harmless():
    moments = RunningMoments("x", 0.9)
    values, mask = torch.full((4,), 2.0), torch.ones(4)
    assert moments.whitened(values, moments.start).tolist() == [2.0] * 4
    sums = {k: float(v) for k, v in moments.sums(values, mask, moments.start).items()}
    after = moments.advance(moments.start, sums)
    assert moments.whitened(values, after).tolist() == [0.0] * 4
    nothing = dict.fromkeys(moments.summed, 0.0)
    assert moments.advance(after, nothing) == after


def test_the_adaptive_coefficient_follows_the_paper():
    """Ziegler et al. 2019, section 2.2: batches of 1,024 of a horizon of 10,000 are its gain of
    about 0.1."""
    close = {"target": 6.0, "horizon": 10_000.0}
    assert adapted(0.1, 6.6, 1024, **close) == pytest.approx(0.1 * (1 + 0.1024 * 0.1))
    assert adapted(0.1, 60.0, 1024, **close) == pytest.approx(0.1 * (1 + 0.1024 * 0.2))
    assert adapted(0.1, -5.0, 1024, **close) == pytest.approx(0.1 * (1 - 0.1024 * 0.2))
    assert adapted(0.1, 0.0, 1e9, **close) == pytest.approx(0.01), "from 0 it could not rise again"


def test_the_adaptive_coefficient_rests_as_long_as_the_policy():
    """During value pretraining the policy is its reference, whatever the coefficient."""
    options = {"kl_controller": "adaptive", "value_pretraining_steps": 2}
    objective = load_objective(ppo_config({"kl_coef": 0.1}, **options))
    scalars, sums = (
        objective.scalars,
        dict.fromkeys(objective.summed, 0.0) | {"completions": 1024.0},
    )
    for _ in range(2):
        scalars = objective.advance(scalars, sums)
    assert scalars["kl_coef"] == 0.1
    assert objective.advance(scalars, sums)["kl_coef"] < 0.1


def test_the_controller_counts_the_kl_of_completions_not_of_tokens():
    columns, logprobs, old, _ = draw(2)
    objective = load_objective(ppo_config({"kl_coef": 0.1}, kl_controller="adaptive"))
    scores = TokenScores(
        logprobs, logprobs, logprobs, {"critic": old}, {"critic": old}, objective.scalars
    )
    sums = {k: float(v) for k, v in objective.loss(scores, columns).sums.items()}
    kl = float(((logprobs - columns.reference) * columns.trained).sum())
    assert sums["kl"] == pytest.approx(kl)
    assert sums["completions"] == len(LENGTHS)
    after = objective.advance(objective.scalars, sums)
    assert after["kl_coef"] == adapted(0.1, kl / 5, 5, target=6.0, horizon=10_000)


# ---- in a trainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("m") / "lm", hidden=32))


def trainer_of(model, train=None, **options):
    settings = {"lr": 3e-3, "weight_decay": 0.1, "algorithm": "ppo", **(train or {})}
    trainer = Trainer(make_config(model=model, train=settings, objective=options), CPU)
    form_alone(trainer)
    trainer.restore("", 0, 0)
    return trainer


def take_step(trainer, step):
    groups = random_groups(4, group_size=3, seed=step, first=10 * step, vocab=15)
    found = train_step(trainer, groups, step).entries
    return {name: total / weight if weight else 0 for name, (total, weight, _) in found.items()}


ALL = {
    "train": {"kl_coef": 0.1},
    "kl_controller": "adaptive",
    "whiten_rewards": True,
    "kl_target": 0.01,
}


def test_a_resumed_run_has_the_same_curve_bit_for_bit_and_one_begun_again_that_of_the_start(
    model, tmp_path
):
    trainer = trainer_of(model, **ALL)
    start = all_bits(trainer.state)
    trainer.attach(tmp_path)
    take_step(trainer, 1)
    take_step(trainer, 2)
    path = trainer.save().result(60).path
    assert trainer.state.scalars["kl_coef"] != 0.1
    resumed = trainer_of(model, **ALL)
    resumed.attach(tmp_path)
    resumed.restore(str(path), 2, 2)
    form_alone(resumed, 2)
    for step in (3, 4):
        assert take_step(resumed, step) == take_step(trainer, step)
    assert_same_bits(all_bits(resumed.state), all_bits(trainer.state))
    assert resumed.digest() == trainer.digest()
    for second_model in (True, False):  # slices go into place, and need none
        with pytest.MonkeyPatch.context() as patch:
            if second_model:
                patch.setattr(SlicedWeights, "of", lambda *_, **__: None)
            else:
                patch.setattr("policy_worker.ranks.sharding.load_model", None)
            trainer.restore("", 0, 5)
        assert_same_bits(all_bits(trainer.state), start)
        form_alone(trainer, 5)
        take_step(trainer, 1)


def test_value_pretraining_leaves_the_policy_exactly_as_it_is(model):
    trainer = trainer_of(model, value_pretraining_steps=2)
    start = {n: t.clone() for n, t in trainer.state.weights_of("policy")}
    critic = trainer.state.parts["critic"].score.weight.clone()
    for step in (1, 2):
        stats = take_step(trainer, step)
        assert stats["grad_norm"] == 0 and stats["grad_norm_critic"] > 0
        assert_same_bits(dict(trainer.state.weights_of("policy")), start)
    assert not torch.equal(trainer.state.parts["critic"].score.weight, critic)
    embedding = trainer.state.parts["policy"].get_input_embeddings().weight
    assert trainer.state.optimizer.state[embedding]["step"] == 0
    take_step(trainer, 3)
    assert not torch.equal(embedding, start["model.embed_tokens.weight"])


def test_what_is_measured_gives_the_explained_variance(model):
    stats = take_step(trainer_of(model), 1)
    assert {"value_loss", "value_mean", "return_mean", "return_square"} <= stats.keys()
    # The critic's head is zero at the start: it explains nothing.
    assert stats["value_mean"] == 0
    assert stats["value_error_square"] == pytest.approx(stats["return_square"])
