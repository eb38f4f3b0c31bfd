"""Gradients over the ranks of a replica: reduced once for each step, in float32, whatever the weights are gathered in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.fixtures import ranks
from tests.fixtures.train_states import tiny_config


def reductions(
    folder: Path,
    when: str,
    dtype: str = "float32",
    count: int = 2,
    train: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> Any:
    config = tiny_config(folder, tokens_per_microbatch=64, gradient_sync=when, **train)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    return ranks.run(count, "reductions", config=config.model_dump_json(), **arguments)


@pytest.mark.long  # three replicas of two ranks
def test_a_step_reduces_once_and_to_the_same_gradient(tmp_path: Path) -> None:
    step, row = (reductions(tmp_path, when) for when in ("step", "row"))
    # Of the blocks and of the root, in the last row alone.
    assert 0 < step["times"] < row["times"]
    assert row["times"] % step["times"] == 0
    assert step["norm"] == pytest.approx(row["norm"], rel=1e-5)
    assert step["sharded"]
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


@pytest.mark.long  # two replicas of two ranks
def test_weights_that_stay_gathered_are_gathered_once_a_row_and_change_no_number(
    tmp_path: Path,
) -> None:
    again = reductions(tmp_path, "step")
    kept = reductions(tmp_path, "step", train={"reshard_after_forward": False})
    # The root stays gathered in both; blocks are gathered by the forward, and by default by the backward as well.
    blocks = kept["units"] - 1
    rows, rest = divmod(kept["gathers"], kept["units"])
    assert rows > 1 and rest == 0
    assert again["gathers"] == rows * (2 * blocks + 1)
    # A measurement is a forward without a backward: the state is slices again after it, in both.
    assert again["sharded"] and kept["sharded"]
    assert {**kept, "gathers": 0} == {**again, "gathers": 0}
