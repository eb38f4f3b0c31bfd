"""The ranks of a replica reduce their gradients once for each step, and get what they get by reducing after every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import ranks
from tests.fixtures.train_states import tiny_config


def reductions(folder: Path, when: str, **arguments: Any) -> Any:
    config = tiny_config(folder, tokens_per_microbatch=64, gradient_sync=when).model_dump_json()
    return ranks.run(2, "reductions", config=config, **arguments)


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
