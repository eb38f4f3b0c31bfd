"""Two ranks hold half each and train what one rank trains; their checkpoints fit any number."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from policy_worker.checkpoint import Checkpointer
from policy_worker.export import export
from tests.helpers import ranks
from tests.helpers.train_states import all_bits, assert_same_bits, tiny_config, tiny_state


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three steps by one rank and by two, then two more from each other's checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    config = tiny_config(folder)
    done = {}
    for size in (1, 2):
        run_dir = folder / f"by-{size}"
        run_dir.mkdir()
        arguments = {"config": config.model_dump_json(), "run_dir": str(run_dir)}
        done[size] = ranks.run(size, "train", steps=3, **arguments)
    for size in (1, 2):
        run_dir = folder / f"crossed-to-{size}"
        run_dir.mkdir()
        done[f"crossed-to-{size}"] = ranks.run(
            size,
            "train",
            config=config.model_dump_json(),
            run_dir=str(run_dir),
            steps=2,
            resume=done[3 - size]["checkpoint"],
        )
    return folder, config, done


def test_two_ranks_train_what_one_rank_trains(runs):
    folder, _, done = runs
    for one, two in zip(done[1]["losses"], done[2]["losses"], strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert two["norm"] == pytest.approx(one["norm"], rel=1e-4)
    _assert_close(
        load_file(folder / "by-1" / "weights-1-ranks.safetensors"),
        load_file(folder / "by-2" / "weights-2-ranks.safetensors"),
    )


def test_each_rank_stores_about_half(runs):
    _, _, done = runs
    (whole,) = done[1]["elements"]
    assert sum(done[2]["elements"]) == whole
    assert max(done[2]["elements"]) < 0.6 * whole


def test_checkpoint_of_two_ranks_restores_into_one_bit_for_bit(runs, tmp_path):
    folder, config, done = runs
    state = tiny_state(config)
    meta = Checkpointer(tmp_path, config).restore(state, done[2]["checkpoint"])
    assert meta["ranks"] == 2
    trained = load_file(folder / "by-2" / "weights-2-ranks.safetensors")
    assert_same_bits(dict(state.named_weights()), trained)
    # The moments came along: one more save by one rank holds what the two ranks' save held.
    again = Checkpointer(tmp_path, config)
    path = again.save_async(state).result(30).path
    other = tiny_state(config)
    again.restore(other, path)
    assert_same_bits(all_bits(other), all_bits(state))
    assert any(t.abs().sum() > 0 for n, t in all_bits(state).items() if n.startswith("exp_avg "))


def test_runs_resumed_with_another_number_of_ranks_stay_together(runs):
    folder, _, done = runs
    for one, two in zip(
        done["crossed-to-1"]["losses"], done["crossed-to-2"]["losses"], strict=True
    ):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    _assert_close(
        load_file(folder / "crossed-to-1" / "weights-1-ranks.safetensors"),
        load_file(folder / "crossed-to-2" / "weights-2-ranks.safetensors"),
    )


def test_export_from_two_ranks_equals_the_gathered_weights(runs, tmp_path):
    folder, _, done = runs
    out = export(done[2]["checkpoint"], None, tmp_path / "out")
    trained = load_file(folder / "by-2" / "weights-2-ranks.safetensors")
    assert_same_bits(load_file(out / "model.safetensors"), trained)


def _assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
