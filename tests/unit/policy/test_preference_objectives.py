"""Objectives of preferences in a step: what elastic training rests on, whole groups in a row."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policy_worker.objectives.batch import StepTotals
from policy_worker.objectives.load import load_objective
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import attended_tokens, pack, plan_rows
from policy_worker.step.gradients import Gradients
from policy_worker.step.held_out import measure_held_out
from policy_worker.trainer import Trainer
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import (
    RECORDED_PAIRS,
    make_config,
    make_group,
    random_groups,
    tiny_network,
)
from tests.fixtures.train_states import all_bits, assert_same_bits
from tests.fixtures.training_steps import (
    CPU,
    flat,
    form_alone,
    keys,
    make_gradients,
    step_totals,
    train_step,
)


def test_a_whole_group_is_never_split_and_one_that_is_too_long_has_a_row_of_its_own() -> None:
    batch = decode(random_groups(9, group_size=4, seed=7))
    keep = np.array([0, 1, 2, 5, 6, 9, 10, 12, 15, 20, 22, 33, 35])
    for limit in (1, 30, 64, 10_000):
        rows = plan_rows(batch, keep, limit, whole_groups=True)
        assert sorted(np.concatenate(rows).tolist()) == keep.tolist()
        homes = [set(batch.group_of[row].tolist()) for row in rows]
        assert sum(map(len, homes)) == len(set.union(*homes)), "a group is in two rows"
        for row, groups in zip(rows, homes, strict=True):
            assert attended_tokens(batch, row).sum() <= limit or len(groups) == 1
    assert plan_rows(batch, keep[:0], 64, whole_groups=True) == []


def test_half_a_pair_is_never_trained() -> None:
    objective = load_objective(make_config(train={"algorithm": "orpo"}))
    batch = decode([make_group("t0", [1], [[2], [3], [4]], [1.0, 0.5, 0.0])])
    columns = objective.columns(batch, StepTotals(1, 0, 3, 3))
    for split in ([0, 1], [1, 2]):
        micro = pack(batch, np.array(split), CPU)
        with pytest.raises(RuntimeError, match="whole_groups"):
            columns.of(micro, CPU, None)
    alone = columns.of(pack(batch, np.array([1]), CPU), CPU, None)
    assert len(alone.pairs.winner) == 0


def gradients_of(groups: list[Any], *, row_tokens: int = 1 << 20, **settings: Any) -> Gradients:
    train = {"tokens_per_microbatch": row_tokens, **settings.pop("train")}
    config = make_config(train=train, **settings)
    gradients = make_gradients(config, frozen={"reference": tiny_network("qwen3", seed=9)})
    if groups:
        gradients.begin(step_totals(groups), keys(groups))
        gradients.add(groups)
    return gradients


@pytest.mark.parametrize("name", ["dpo", "ipo", "orpo", "kto"])
def test_a_step_is_the_same_in_one_row_and_in_a_row_for_each_group(name: str) -> None:
    """With a reference that is another model, so that no log-ratio is 0."""
    groups = random_groups(5, group_size=4, seed=3)
    one = gradients_of(groups, train={"algorithm": name})
    many = gradients_of(groups, train={"algorithm": name}, row_tokens=1)
    wanted = flat(one)
    # Sums in another order differ by the rounding of their largest terms; ipo's gradients reach 28.
    rounding = 1e-6 * float(wanted.abs().max())
    torch.testing.assert_close(flat(many), wanted, atol=max(5e-7, rounding), rtol=2e-4)
    for metric, (total, weight, _) in one.stats.entries.items():
        if metric == "row_tokens":  # a prompt is in more rows
            continue
        assert many.stats.entries[metric][:2] == pytest.approx((total, weight), rel=1e-4, abs=1e-6)
    assert one.stats.mean("loss") == pytest.approx(many.stats.mean("loss"), rel=1e-5)


@pytest.mark.parametrize("row_tokens", [1, 1 << 20])
def test_held_out_pairs_are_measured_as_a_step_measures_them(row_tokens: int) -> None:
    """Also groups that make no pair are there, and no pair is split over rows."""
    groups = random_groups(5, group_size=4, seed=3)
    for completion in groups[2].completions:
        completion.reward = 1.0
    trained = gradients_of(groups, train={"algorithm": "dpo"})
    held_out = gradients_of([], row_tokens=row_tokens, train={"algorithm": "dpo"})
    found = measure_held_out(held_out, groups)
    for name in ("pair_accuracy", "reward_margin", "chosen_logprob_shift"):
        total, weight, _ = trained.stats.entries[name]
        assert found.entries[name][:2] == pytest.approx((total, weight), rel=1e-4, abs=1e-6)
    assert found.mean("loss") == pytest.approx(trained.stats.mean("loss"), rel=1e-5)


def test_pairs_are_counted_in_what_is_measured() -> None:
    """Two of the three groups have unequal rewards."""
    tokens = [[3, 4], [5], [6, 7, 8]]
    groups = [
        make_group("t0", [1, 2], tokens, [1.0, 0.0, 0.0]),
        make_group("t1", [1, 2], tokens, [1.0, 1.0, 1.0]),
        make_group("t2", [1, 2], tokens, [0.3, 0.1, 0.2]),
    ]
    found = gradients_of(groups, train={"algorithm": "online_dpo"}).stats.entries
    for name in ("pair_accuracy", "reward_margin", "chosen_logprob_shift"):
        assert found[name][1] == 2
    # The third group's middle completion is in no pair, and neither is one of the first group's.
    assert found["entropy"][1] == 2 + 3 + 2 + 1


def test_a_step_without_any_pair_has_no_gradient_and_still_ends() -> None:
    groups = [make_group("t0", [1, 2], [[3, 4], [5]], [1.0, 1.0])]
    gradients = gradients_of(groups, train={"algorithm": "dpo"})
    assert float(flat(gradients).abs().max()) == 0
    assert gradients.stats.mean("loss") == 0
    assert "pair_accuracy" not in gradients.stats.entries


def trained(trainer: Trainer, steps: range) -> list[dict[str, Any]]:
    """What was measured in each of ``steps``."""
    found = []
    for step in steps:
        groups = random_groups(4, group_size=2, seed=step, first=10 * step, vocab=15)
        for group in groups:
            group.completions[0].reward, group.completions[1].reward = 1.0, 0.0
        found.append(train_step(trainer, groups, step).entries)
    return found


def new_trainer(config: Any, run_dir: Path) -> Trainer:
    trainer = Trainer(config, CPU)
    trainer.attach(run_dir)
    form_alone(trainer)
    return trainer


def test_a_run_that_is_resumed_from_a_checkpoint_has_the_same_curve(tmp_path: Path) -> None:
    """Also the reference is the same: the model that the run began with, not the one that it
    resumes."""
    model = make_tiny_model(tmp_path / "model", hidden=32)
    config = make_config(model=model, train={"algorithm": "dpo", "lr": 1e-2}, **RECORDED_PAIRS)
    first = new_trainer(config, tmp_path / "run")
    first.restore("", 0, 0)
    begun = trained(first, range(1, 3))
    saved = first.save().result(60)
    undisturbed = trained(first, range(3, 6))
    resumed = new_trainer(config, tmp_path / "run")
    resumed.restore(str(saved.path), 2, 2)
    assert trained(resumed, range(3, 6)) == undisturbed
    assert_same_bits(all_bits(resumed.state), all_bits(first.state))
    assert begun[0]["reward_margin"][0] == pytest.approx(0, abs=1e-5)
    assert abs(undisturbed[-1]["reward_margin"][0]) > 1e-3
    first.close()
    resumed.close()
