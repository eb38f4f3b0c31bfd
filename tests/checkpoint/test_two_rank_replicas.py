"""Real training by replicas of two ranks: the same as by one rank, alone and in an elastic mesh."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from policy_worker.checkpoint import Checkpointer, read_meta
from policy_worker.export import export
from tests.helpers import ranks
from tests.helpers.redis_process import throwaway_redis
from tests.helpers.train_states import all_bits, assert_same_bits, tiny_config, tiny_state

STEPS = 3


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three trainings of the same steps; each goes on from the checkpoint of the one before it.

    two: one replica of two ranks. one: one rank. mesh: two replicas of two ranks each.
    """
    folder = tmp_path_factory.mktemp("two-ranks")
    config = tiny_config(folder, tokens_per_microbatch=64)
    arguments = {"config": config.model_dump_json(), "steps": STEPS}
    two = ranks.run(2, "trainer", run_dir=_made(folder / "two"), **arguments)
    one = ranks.run(
        1,
        "trainer",
        run_dir=_made(folder / "one"),
        then_resume=two["checkpoint"],
        **arguments,
    )
    with throwaway_redis(folder / "redis") as url:
        members = [
            ranks.start(
                2,
                "trainer",
                run_dir=_made(folder / "mesh"),
                url=url,
                mesh_rank=rank,
                mesh_size=2,
                then_resume=one["checkpoint"],
                **arguments,
            )
            for rank in range(2)
        ]
        mesh = []
        for member in members:
            out, err = member.communicate(timeout=100)
            assert member.returncode == 0, err
            mesh.append(json.loads(out))
    return folder, config, one, two, mesh


def test_two_ranks_give_the_losses_gradients_and_weights_of_one(runs):
    folder, _, one, two, _ = runs
    _assert_same_training("trained", [one], [two])
    _assert_close(_weights(folder / "one", "trained"), _weights(folder / "two", "trained"))


def test_two_replicas_of_two_ranks_stay_identical_and_train_the_same(runs):
    folder, _, one, _, mesh = runs
    for phase in ("trained", "continued"):
        digests = [[step["digest"] for step in member[phase]] for member in mesh]
        assert digests[0] == digests[1]
        assert len(set(digests[0])) == STEPS
        assert_same_bits(_weights(folder / "mesh", phase, 0), _weights(folder / "mesh", phase, 1))
    _assert_same_training("trained", [one], mesh)
    _assert_close(_weights(folder / "one", "trained"), _weights(folder / "mesh", "trained"))


def test_each_rank_stores_about_half(runs):
    _, _, one, two, _ = runs
    (whole,) = one["elements"]
    assert sum(two["elements"]) == whole
    assert max(two["elements"]) < 0.6 * whole


def test_checkpoint_of_two_ranks_restores_into_one_bit_for_bit(runs, tmp_path):
    folder, config, _, two, _ = runs
    assert_same_bits(_weights(folder / "one", "resumed"), _weights(folder / "two", "trained"))
    state = tiny_state(config)
    checkpointer = Checkpointer(tmp_path, config)
    assert checkpointer.restore(state, two["checkpoint"])["ranks"] == 2
    assert_same_bits(dict(state.named_weights()), _weights(folder / "two", "trained"))
    moments = {n: t for n, t in all_bits(state).items() if n.startswith("exp_avg ")}
    assert all(t.abs().sum() > 0 for t in moments.values())


def test_checkpoint_of_one_rank_restores_into_two_bit_for_bit(runs):
    folder, _, one, _, _ = runs
    assert read_meta(folder / "one" / "checkpoints" / f"step-{STEPS:06d}")["ranks"] == 1
    for rank in (0, 1):
        resumed = _weights(folder / "mesh", "resumed", rank)
        assert_same_bits(resumed, _weights(folder / "one", "trained"))
    assert one["checkpoint"].endswith(f"step-{STEPS:06d}")


def test_runs_that_changed_their_number_of_ranks_stay_together(runs):
    """The moments and the learning rate came along, or the steps after the change would differ."""
    folder, _, one, _, mesh = runs
    _assert_same_training("continued", [one], mesh)
    _assert_close(_weights(folder / "one", "continued"), _weights(folder / "mesh", "continued"))


def test_export_from_two_ranks_equals_the_gathered_weights(runs, tmp_path):
    folder, _, _, two, _ = runs
    out = export(two["checkpoint"], None, tmp_path / "out")
    assert_same_bits(load_file(out / "model.safetensors"), _weights(folder / "two", "trained"))


def _made(folder) -> str:
    folder.mkdir(exist_ok=True)
    return str(folder)


def _weights(folder, phase, rank=0):
    return load_file(folder / f"{phase}-{rank}.safetensors")


def _assert_same_training(phase, one, other) -> None:
    for step in range(STEPS):
        means = []
        for members in (one, other):
            said = [member[phase][step] for member in members]
            means.append(sum(s["loss"][0] for s in said) / sum(s["loss"][1] for s in said))
            for s in said:
                assert s["norm"] == pytest.approx(one[0][phase][step]["norm"], rel=1e-3)
        assert means[1] == pytest.approx(means[0], rel=1e-3, abs=1e-6)


def _assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
