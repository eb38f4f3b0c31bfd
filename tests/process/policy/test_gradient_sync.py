"""Gradients over the ranks of a replica: reduced once for each step, in float32, whatever the weights are gathered in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import ranks
from tests.fixtures.train_states import tiny_config


def reductions(
    folder: Path, when: str, dtype: str = "float32", count: int = 2, **arguments: Any
) -> Any:
    config = tiny_config(folder, tokens_per_microbatch=64, gradient_sync=when)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    return ranks.run(count, "reductions", config=config.model_dump_json(), **arguments)


@pytest.mark.long  # three replicas of two ranks
def test_a_step_reduces_once_and_to_the_same_gradient(tmp_path: Path) -> None:
    step, row = (reductions(tmp_path, when) for when in ("step", "row"))
    # Of the blocks and of the root, in the last row alone.
    assert 0 < step["times"] < row["times"]
    assert row["times"] % step["times"] == 0
    assert step["norm"] == pytest.approx(row["norm"], rel=1e-5)
    # What a step that was left behind had added up is in no later one.
    again = reductions(tmp_path, "step", leave=True)
    assert again["cancelled"] is True
    assert again["times"] == step["times"]
    assert again["norm"] == step["norm"]


@pytest.mark.long  # three replicas of two ranks
def test_bfloat16_is_gathered_and_float32_is_summed_and_stored(tmp_path: Path) -> None:
    half = reductions(tmp_path, "step", "bfloat16")
    assert half["gathered"] == ["torch.bfloat16"]
    assert half["reduced"] == half["stored"] == ["torch.float32"]
    # As one rank with autocast, and as float32, up to the precision of bfloat16.
    one = reductions(tmp_path, "step", "bfloat16", count=1)
    whole = reductions(tmp_path, "step")
    assert whole["gathered"] == ["torch.float32"]
    for other in (one, whole):
        assert half["norm"] == pytest.approx(other["norm"], rel=0.02)
        assert half["loss"] == pytest.approx(other["loss"], rel=0.02, abs=1e-3)
