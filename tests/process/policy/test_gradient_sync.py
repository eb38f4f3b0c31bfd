"""Gradients over the ranks of a replica: reduced in every row, in float32, whatever the weights are
gathered in."""

from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import ranks
from tests.fixtures.train_states import tiny_config

pytestmark = pytest.mark.long

Measured = dict[str, dict[str, Any]]


def config_of(folder: Path, dtype: str = "float32", **train: Any) -> str:
    config = tiny_config(folder, tokens_per_microbatch=64, **train)
    model = config.model.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"model": model}).model_dump_json()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """A step each of one replica of two ranks."""
    folder = tmp_path_factory.mktemp("reductions")
    each: dict[str, dict[str, Any]] = {
        "step": {"config": config_of(folder)},
        "left": {"config": config_of(folder), "leave": True},
        "half": {"config": config_of(folder, "bfloat16")},
        "kept": {"config": config_of(folder, reshard_after_forward=False)},
    }
    found = ranks.run_each(2, [("reductions", arguments) for arguments in each.values()])
    return dict(zip(each, found, strict=True))


def test_a_step_reduces_every_row_and_one_that_was_left_leaves_nothing(
    measured: Measured,
) -> None:
    step, again = measured["step"], measured["left"]
    rows, rest = divmod(step["times"], step["units"])
    assert rows > 1 and rest == 0
    assert step["sharded"]
    assert again["cancelled"] is True
    assert again["times"] == step["times"] + step["units"], "the row before it was left"
    assert again["norm"] == step["norm"]


def test_bfloat16_is_gathered_and_float32_is_summed_and_stored(
    measured: Measured, tmp_path: Path
) -> None:
    half = measured["half"]
    assert half["gathered"] == ["torch.bfloat16"]
    assert half["reduced"] == half["stored"] == ["torch.float32"]
    # As one rank with its copies, and as float32, up to the precision of bfloat16.
    one = ranks.run(1, "reductions", config=config_of(tmp_path, "bfloat16"))
    whole = measured["step"]
    assert whole["gathered"] == ["torch.float32"]
    for other in (one, whole):
        assert half["norm"] == pytest.approx(other["norm"], rel=0.02)
        assert half["loss"] == pytest.approx(other["loss"], rel=0.02, abs=1e-3)


def test_weights_that_stay_gathered_are_gathered_once_a_row_and_change_no_number(
    measured: Measured,
) -> None:
    again, kept = measured["step"], measured["kept"]
    # The root stays gathered in both; blocks are gathered by the forward, and by default by the
    # backward as well.
    blocks = kept["units"] - 1
    rows, rest = divmod(kept["gathers"], kept["units"])
    assert rows > 1 and rest == 0
    assert again["gathers"] == rows * (2 * blocks + 1)
    # A measurement is a forward without a backward: the state is slices again after it, in both.
    assert again["sharded"] and kept["sharded"]
    assert {**kept, "gathers": 0} == {**again, "gathers": 0}
