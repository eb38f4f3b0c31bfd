"""Runs of preference objectives as a user starts them."""

import json
import math
import random
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.long
def test_online_dpo_trains_pairs_of_sampled_groups_on_two_replicas(start: Start) -> None:
    up = start(
        train={"algorithm": "online_dpo", "eval_every": 6},
        objective={"beta": 0.5, "pairs": "all"},
        fleet={"controllers": 1, "rollout": 1},
    )
    assert up.wait() == 0, up.said()
    steps = [row for row in up.metrics() if row["kind"] == "step"]
    assert len(steps) == 6
    paired = [row for row in steps if "pair_accuracy" in row]
    assert paired, "no group had unequal rewards"
    for row in paired:
        assert 0 <= row["pair_accuracy"] <= 1
        assert row["reward_margin"] == pytest.approx(
            row["chosen_reward"] - row["rejected_reward"], abs=1e-6
        )
    summary = up.assert_sound()
    assert (Path(summary["export"]) / "model.safetensors").is_file()


def write_pairs(path: Path, count: int = 48, seed: int = 0) -> Path:
    """Rows whose chosen completion has the digits in order, and whose rejected one has them
    reversed."""
    draw = random.Random(seed)
    rows = []
    while len(rows) < count:
        digits = "".join(draw.choices("0123456789", k=draw.randint(2, 4)))
        right, wrong = "".join(sorted(digits)), "".join(sorted(digits, reverse=True))
        if right != wrong:
            rows.append({"prompt": f"s{digits}=", "chosen": right, "rejected": wrong})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["dpo", "reward_model"])
def test_recorded_pairs_train_exactly_once_and_are_told_apart(
    start: Start, algorithm: str, tmp_path: Path
) -> None:
    """Four passes over 48 pairs."""
    up = start(
        data={
            "path": str(write_pairs(tmp_path / "pairs.jsonl")),
            "chosen_field": "chosen",
            "rejected_field": "rejected",
            "eval_path": str(write_pairs(tmp_path / "held_out_pairs.jsonl", 16, seed=1)),
        },
        train={
            "algorithm": algorithm,
            "steps": 12,
            "groups_per_step": 16,
            "lr": 3e-3,
            "checkpoint_every": 12,
            "eval_every": 12,
        },
        rollout={"source": "recorded", "group_size": 2},
        fleet={"controllers": 1, "policy": 1, "rollout": 1},
    )
    assert up.wait() == 0, up.said()
    steps = [row for row in up.metrics() if row["kind"] == "step"]
    assert len(steps) == 12
    # Both completions of a pair have one score before the first update.
    assert steps[0]["pair_accuracy"] == pytest.approx(0.5)
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert sum(row["pair_accuracy"] for row in steps[-3:]) / 3 > 0.7
    before, after = [row for row in up.metrics() if row["kind"] == "eval"]
    assert (before["eval_pair_accuracy"], before["eval_count"]) == (pytest.approx(0.5), 16)
    assert after["eval_pair_accuracy"] > 0.7 and after["eval_loss"] < before["eval_loss"]
    summary = up.assert_sound()
    assert summary["samples_trained"] == 12 * 16 * 2
    kind = {"dpo": AutoModelForCausalLM, "reward_model": AutoModelForSequenceClassification}
    exported = kind[algorithm].from_pretrained(summary["export"])
    assert type(exported).__name__ in exported.config.architectures
