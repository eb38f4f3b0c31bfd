"""The gradient of a step must not depend on who computes which part of it, nor when."""

import numpy as np
import pytest
import torch

from controller.services.validation import check_stats
from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.payloads.group_limits import GroupLimits
from paceline.v1 import rollout_pb2
from policy_worker.objectives.batch import StepTotals
from policy_worker.rows.group_reading import decode
from policy_worker.step.stats import Stats
from tests.fixtures.group_meta import accepted
from tests.fixtures.policy_models import make_config, random_groups, tiny_network
from tests.fixtures.training_steps import flat, keys, make_gradients, step_totals

CPU = torch.device("cpu")


def test_a_step_that_is_left_stops_within_a_micro_batch_and_can_be_begun_anew():
    config, groups = (
        make_config(train={"tokens_per_microbatch": 32}),
        random_groups(4, group_size=4, seed=3),
    )
    gradients = make_gradients(config)
    rows = []
    gradients.on_progress = lambda: rows.append(1)
    gradients.left = lambda: len(rows) == 2
    gradients.begin(step_totals(groups), keys(groups))
    with pytest.raises(EpochCancelled, match="given up"):
        gradients.add(groups)
    assert len(rows) == 2
    gradients.left = lambda: False
    assert gradients.begin(step_totals(groups), keys(groups)) == keys(groups)
    gradients.add(groups)
    assert torch.equal(flat(gradients), whole_step(config, groups)[0])


def whole_step(config, groups, *parts, **kwargs):
    """Flat gradient of ``groups``, added in ``parts`` (lists of groups; default: all at once)."""
    gradients = make_gradients(config, **kwargs)
    gradients.begin(step_totals(groups), keys(groups))
    for part in parts or [groups]:
        gradients.add(part)
    return flat(gradients), gradients


def padded_reference(config, groups):
    """Gradient and loss by a padded batch through the model's ordinary forward, in plain torch, and
    policy / behaviour of every token."""
    model = tiny_network("qwen3")
    sequences, weights = [], []
    spec = step_totals(groups)
    for group in groups:
        prompt = np.frombuffer(group.prompt_tokens, "<i4").tolist()
        rewards = torch.tensor([c.reward for c in group.completions], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for completion, advantage in zip(group.completions, advantages, strict=True):
            tokens = np.frombuffer(completion.tokens, "<i4").tolist()
            old = torch.tensor(np.frombuffer(completion.logprobs, "<f4").copy())
            sequences.append((prompt, tokens, old))
            weights.append(float(advantage))
    longest = max(len(p) + len(t) for p, t, _ in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, tokens, _) in enumerate(sequences):
        ids[row, : len(prompt) + len(tokens)] = torch.tensor(prompt + tokens)
        mask[row, : len(prompt) + len(tokens)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logp = torch.log_softmax(logits / config.rollout.temperature, -1)
    loss, ratios = torch.zeros(()), []
    for row, (prompt, tokens, old) in enumerate(sequences):
        at = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        r = (logp[row, at, torch.tensor(tokens)] - old).exp()
        ratios.append(r.detach())
        a = weights[row]
        surrogate = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
        if a < 0:
            surrogate = surrogate.clamp(min=3.0 * a)
        loss = loss - surrogate.sum() / spec.tokens
    loss.backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    return gradient, float(loss), torch.cat(ratios)


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-7, rtol=2e-4)


def test_a_step_equals_the_padded_textbook_step():
    config = make_config(rollout={"temperature": 0.9})
    groups = random_groups(6, group_size=4, seed=11)
    expected, loss, _ = padded_reference(config, groups)
    got, gradients = whole_step(config, groups)
    close(got, expected)
    assert gradients.stats.mean("loss") == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_replicas_add_up_to_the_whole_step(aggregation):
    config = make_config(train={"aggregation": aggregation})
    groups = random_groups(6, group_size=3, seed=2)
    whole, one = whole_step(config, groups)
    first, a = whole_step(config, groups, groups[:1])
    second, b = whole_step(config, groups, groups[1:])
    close(first + second, whole)
    a.stats.merge([b.stats.entries])
    for name in ("loss", "entropy", "ratio", "logprob_gap", "clip_fraction"):
        assert a.stats.mean(name) == pytest.approx(one.stats.mean(name), rel=1e-4, abs=1e-7)
    assert a.stats.entries["ratio"][2] == pytest.approx(one.stats.entries["ratio"][2])


def test_staleness_is_no_part_of_the_fresh_gap():
    groups = random_groups(2, group_size=3, seed=2)
    fresh, stale = make_gradients(make_config()), make_gradients(make_config())
    for gradients, step in ((fresh, 1), (stale, 2)):
        gradients.begin(step_totals(groups, step), keys(groups))
        gradients.add(groups)
    assert fresh.stats.entries["logprob_gap_fresh"] == fresh.stats.entries["logprob_gap"]
    assert "logprob_gap_fresh" not in stale.stats.entries
    assert "logprob_gap" in stale.stats.entries


@pytest.mark.parametrize(
    "bounds", [{}, {"proximal": "trainer", "tis_cap": 1.01}, {"clip_low": 0.01, "clip_high": 0.01}]
)
def test_the_effective_sample_size_is_that_of_the_weights_before_any_bound(bounds):
    """From the sums that a vote carries, as the controller merges them over replicas."""
    config = make_config(train={"skip_zero_advantage": False, **bounds})
    groups = random_groups(4, group_size=3, seed=2)
    *_, w = padded_reference(config, groups)
    expected = float(w.sum() ** 2 / (len(w) * w.square().sum()))
    assert expected < 0.99
    _, a = whole_step(config, groups, groups[:1])
    _, b = whole_step(config, groups, groups[1:])
    a.stats.merge([b.stats.entries])
    (total, count, _), (squares, *_) = (a.stats.entries[n] for n in ("ratio", "ratio_square"))
    assert count == len(w)
    assert total * total / (count * squares) == pytest.approx(expected, rel=1e-4)


def test_skipping_zero_advantage_changes_no_gradient():
    groups = random_groups(4, group_size=3, seed=6)
    for completion in groups[1].completions:
        completion.reward = 1.0
    skipped, a = whole_step(make_config(), groups)
    computed, b = whole_step(make_config(train={"skip_zero_advantage": False}), groups)
    close(skipped, computed)
    assert a.stats.entries["entropy"][1] < b.stats.entries["entropy"][1]


def test_zero_advantage_still_counts_for_the_kl():
    config = make_config(train={"kl_coef": 0.5})
    groups = random_groups(2, group_size=3, seed=6)
    for group in groups:
        for completion in group.completions:
            completion.reward = 1.0
    gradient, gradients = whole_step(
        config, groups, frozen={"reference": tiny_network("qwen3", seed=9)}
    )
    assert gradient.abs().max() > 0
    assert gradients.stats.mean("kl") > 0


def test_groups_of_later_epochs_and_steps_are_added_once_and_alone():
    config = make_config()
    groups = random_groups(3, group_size=3, seed=5)
    spec = step_totals(groups)
    gradients = make_gradients(config)
    assert gradients.begin(spec, keys(groups[:2])) == keys(groups[:2])
    gradients.add(groups[:2])
    assert gradients.begin(spec, keys(groups)) == keys(groups[2:])
    gradients.add(groups[2:])
    assert gradients.begin(spec, keys(groups)) == []
    close(flat(gradients), whole_step(config, groups)[0])
    # Declared dead meanwhile: after rejoining, group 0 is somebody else's.
    assert gradients.begin(spec, keys(groups[1:])) == keys(groups[1:])
    gradients.add(groups[1:])
    close(flat(gradients), whole_step(config, groups, groups[1:])[0])
    # The step is abandoned.
    new = random_groups(2, group_size=3, seed=2)
    gradients.begin(step_totals(new, step=2), keys(new))
    gradients.add(new)
    assert torch.equal(flat(gradients), whole_step(config, new)[0])
    gradients.begin(StepTotals(3, 0, 10, 2), [])
    assert (flat(gradients) == 0).all(), "nothing of this replica's"


def with_old_heads(groups, *, as_environment=False):
    """The first half of each completion is of version 0, the rest of version 4; or masked
    instead."""
    aged = [rollout_pb2.Group.FromString(group.SerializeToString()) for group in groups]
    for completion in (c for group in aged for c in group.completions):
        count = len(completion.tokens) // 4
        head = count // 2
        del completion.versions[:]
        if as_environment:
            completion.versions.add(version=4, length=count)
            completion.loss_mask = bytes([0] * head + [1] * (count - head))
            continue
        for version, length in ((0, head), (4, count - head)):
            if length:
                completion.versions.add(version=version, length=length)
    return aged


def totals_of(groups, oldest_step):
    """As the controller counts them, for step 6."""
    sizes = [accepted(g, GroupLimits(3, 100), 5) for g in groups]
    tokens = sum(n for size in sizes for v, n in size.token_versions if v >= oldest_step)
    sequences = sum(
        n for size in sizes for found, n in size.sequence_versions if max(found) >= oldest_step
    )
    return StepTotals(6, 5, tokens, sequences, ((0, 0),), oldest_step)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_tokens_beyond_the_age_are_masked_as_if_an_environment_had_written_them(aggregation):
    config = make_config(train={"aggregation": aggregation, "kl_coef": 0.1})
    plain = random_groups(4, group_size=3, seed=8)
    aged, masked = with_old_heads(plain), with_old_heads(plain, as_environment=True)
    assert totals_of(aged, 2).tokens == totals_of(masked, 0).tokens
    got = []
    for groups, oldest_step, parts in (
        (aged, 2, [aged]),
        (masked, 0, [masked]),
        (aged, 2, [aged[3:], aged[:1], aged[1:3]]),
        (aged, 0, [aged]),
    ):
        gradients = make_gradients(config, frozen={"reference": tiny_network("qwen3", seed=9)})
        gradients.begin(totals_of(groups, oldest_step), keys(groups))
        for part in parts:
            gradients.add(part)
        got.append(flat(gradients))
        trained = gradients.stats.entries["ratio"][1]
        assert trained == totals_of(groups, oldest_step).tokens
    assert torch.equal(got[0], got[1])
    close(got[2], got[0])
    assert not torch.allclose(got[3], got[0]), "without the bound the old tokens have weight"


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "dr_grpo"])
def test_a_wholly_masked_sequence_takes_no_weight_from_the_others(aggregation):
    """The weights of those that are trained sum to 1, so the loss is their mean."""
    config = make_config(train={"aggregation": aggregation})
    (group,) = random_groups(1, group_size=3, seed=8)
    old = group.completions[0]
    del old.versions[:]
    old.versions.add(version=0, length=len(old.tokens) // 4)
    for completion in group.completions[1:]:
        del completion.versions[:]
        completion.versions.add(version=5, length=len(completion.tokens) // 4)
    totals = totals_of([group], 2)
    assert totals.sequences == 2
    gradients = make_gradients(config)
    gradients.begin(totals, keys([group]))
    gradients.add([group])
    assert gradients.stats.entries["loss"][1] == pytest.approx(1.0)
    columns = gradients.objective.columns(decode([group]), totals)
    if aggregation != "dr_grpo":
        assert columns.weight.sum() == pytest.approx(1.0)


def test_statistics_that_are_not_finite_do_not_have_a_vote_refused():
    """A step whose gradient is not finite must commit, skipped: its vote has to pass the door."""
    stats = Stats()
    stats.add("loss", float("nan"), 1.0)
    stats.add("ratio", 2.0, 1.0, float("inf"))
    stats.add("entropy", 1.5, 3.0)
    assert list(check_stats(stats.messages())) == ["entropy"]


def test_bfloat16_computation_keeps_float32_gradients():
    groups = random_groups(3, group_size=3, seed=2)
    exact, _ = whole_step(make_config(), groups)
    rough, gradients = whole_step(make_config(model_section={"dtype": "bfloat16"}), groups)
    assert all(p.grad.dtype == torch.float32 for p in gradients.parameters if p.grad is not None)
    assert torch.nn.functional.cosine_similarity(exact, rough, dim=0) > 0.98
