"""Real training by replicas of two ranks: the same as by one rank, alone and in an elastic mesh."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.config.schema import Config
from policy_worker.checkpoint.checkpoint import Checkpointer, read_meta
from policy_worker.checkpoint.export import export
from testbed.redis.redis_process import throwaway_redis
from tests.fixtures import ranks
from tests.fixtures.train_states import all_bits, assert_same_bits, tiny_config, tiny_state

STEPS = 3

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
]  # five trainings, by processes that import torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two-ranks")


@pytest.fixture(scope="module")
def config(folder):
    return tiny_config(folder, tokens_per_microbatch=64)


@pytest.fixture(scope="module")
def critic_config(folder):
    settings = tiny_config(folder, tokens_per_microbatch=64, kl_coef=0.1).model_dump(mode="json")
    settings["train"]["algorithm"] = "ppo"
    settings["objective"] = {
        "kl_controller": "adaptive",
        "critic_lr_scale": 1.0,
        "value_pretraining_steps": 2,
    }
    return Config.model_validate(settings)


@pytest.fixture(scope="module")
def lora_config(folder):
    """Adapters, and their base as reference."""
    settings = tiny_config(folder, tokens_per_microbatch=64, kl_coef=0.1).model_dump(mode="json")
    settings["model"] |= {"lora": {"rank": 3}}
    return Config.model_validate(settings)


@pytest.fixture(scope="module")
def by_two(folder, config, critic_config, lora_config):
    """What one replica of two ranks does: a training, that of a critic, and that of adapters."""
    arguments = {"config": config.model_dump_json(), "run_dir": _made(folder / "two")}
    critic = {"config": critic_config.model_dump_json(), "run_dir": _made(folder / "critic-two")}
    lora = {"config": lora_config.model_dump_json(), "run_dir": _made(folder / "lora-two")}
    parked = arguments | {"run_dir": _made(folder / "parked"), "steps": STEPS, "turns": True}
    each = {
        "trained": ("trainer", arguments | {"steps": STEPS}),
        "parked": ("trainer", parked),
        "critic": ("trainer", critic | {"steps": STEPS}),
        "lora": ("trainer", lora | {"steps": STEPS}),
    }
    return dict(zip(each, ranks.run_each(2, list(each.values())), strict=True))


@pytest.fixture(scope="module")
def runs(folder, config, by_two):
    """Three trainings of the same steps; each goes on from the checkpoint of the one before it.

    two: one replica of two ranks. one: one rank. mesh: two replicas of two ranks each.
    """
    arguments = {"config": config.model_dump_json(), "steps": STEPS}
    two = by_two["trained"]
    one = ranks.run(
        1,
        "trainer",
        run_dir=_made(folder / "one"),
        then_resume=two["checkpoint"],
        **arguments,
    )
    with throwaway_redis(folder / "redis") as url:
        members = [
            ranks.fork(
                2,
                "trainer",
                run_dir=_made(folder / "mesh"),
                url=url,
                mesh_rank=rank,
                mesh_size=2,
                then_resume=one["checkpoint"],
                then_hang=True,
                **arguments,
            )
            for rank in range(2)
        ]
        status, err = members[0].end()
        assert status == 0, err
        mesh = [json.loads(member.until_printed()) for member in members]
        members[1].kill()  # hung on purpose
        members[1].end()
    return one, two, mesh


def test_two_ranks_give_the_losses_gradients_and_weights_of_one(folder, runs):
    one, two, _ = runs
    _assert_same_training("trained", [one], [two])
    _assert_close(_weights(folder / "one", "trained"), _weights(folder / "two", "trained"))
    (whole,) = one["elements"]
    assert sum(two["elements"]) == whole and max(two["elements"]) < 0.6 * whole


def test_checkpoint_of_one_rank_restores_into_two_and_they_train_on_as_one_does(folder, runs):
    """Bit for bit, with the moments and the learning rate, or the steps after it would differ."""
    one, _, mesh = runs
    assert read_meta(Path(one["checkpoint"]))["ranks"] == 1
    for rank in (0, 1):
        resumed = _weights(folder / "mesh", "resumed", rank)
        assert_same_bits(resumed, _weights(folder / "one", "trained"))
    assert f"step-{STEPS:06d}." in one["checkpoint"]
    _assert_same_training("continued", [one], mesh)
    _assert_close(_weights(folder / "one", "continued"), _weights(folder / "mesh", "continued"))


def test_two_replicas_of_two_ranks_stay_identical_and_train_the_same(folder, runs):
    one, _, mesh = runs
    for phase in ("trained", "continued"):
        digests = [[step["digest"] for step in member[phase]] for member in mesh]
        assert digests[0] == digests[1]
        assert len(set(digests[0])) == STEPS
        assert_same_bits(_weights(folder / "mesh", phase, 0), _weights(folder / "mesh", phase, 1))
    _assert_same_training("trained", [one], mesh)
    _assert_close(_weights(folder / "one", "trained"), _weights(folder / "mesh", "trained"))


def test_rank_that_waits_for_a_hung_peer_is_freed_when_the_epoch_ends(runs):
    """Rank 0 had its reduction and waits for rank 1, which waits for a stopped process."""
    *_, mesh = runs
    error, seconds = mesh[0]["freed"]
    assert error in ("EpochCancelled", "MeshError")
    assert 0.4 < seconds < 3.0


def test_checkpoint_of_two_ranks_restores_into_one_bit_for_bit(folder, config, runs, tmp_path):
    _, two, _ = runs
    assert_same_bits(_weights(folder / "one", "resumed"), _weights(folder / "two", "trained"))
    state = tiny_state(config)
    checkpointer = Checkpointer(tmp_path, config)
    assert checkpointer.restore(state, two["checkpoint"])["ranks"] == 2
    assert_same_bits(dict(state.named_weights()), _weights(folder / "two", "trained"))
    moments = {n: t for n, t in all_bits(state).items() if n.startswith("exp_avg ")}
    assert all(t.abs().sum() > 0 for t in moments.values())


def test_ranks_that_give_their_memory_up_between_steps_have_the_same_bits(folder, by_two):
    trained, parked = by_two["trained"], by_two["parked"]
    assert [s["digest"] for s in parked["trained"]] == [s["digest"] for s in trained["trained"]]
    assert_same_bits(_weights(folder / "parked", "trained"), _weights(folder / "two", "trained"))
    states = []
    for found in trained, parked:
        states.append(tiny_state(tiny_config(folder, tokens_per_microbatch=64)))
        Checkpointer(folder, states[-1].config).restore(states[-1], found["checkpoint"])
    assert_same_bits(*map(all_bits, states))


def test_export_from_two_ranks_equals_the_gathered_weights(folder, by_two, tmp_path):
    out = export(by_two["trained"]["checkpoint"], None, tmp_path / "out")
    assert_same_bits(load_file(out / "model.safetensors"), _weights(folder / "two", "trained"))


def test_two_ranks_train_a_critic_as_one_does(by_two, critic_config, tmp_path):
    """Its head has one row, so one rank stores none of it; the moments are sums over both. In two
    of the three steps the policy rests: its slices must stay slices though no backward pass comes.
    """
    two = by_two["critic"]
    arguments = {"config": critic_config.model_dump_json(), "steps": STEPS}
    one = ranks.run(1, "trainer", run_dir=str(tmp_path), **arguments)
    _assert_same_training("trained", [one], [two])
    for mine, theirs in zip(one["trained"], two["trained"], strict=True):
        assert mine["scalars"] == pytest.approx(theirs["scalars"], rel=1e-3)
    states = []
    for found in (one, two):
        states.append(tiny_state(critic_config))
        Checkpointer(tmp_path, critic_config).restore(states[-1], found["checkpoint"])
    _assert_close(*(dict(state.named_weights()) for state in states))
    assert states[0].parts["critic"].score.weight.any()


def test_two_ranks_train_adapters_as_one_does(by_two, folder, lora_config, tmp_path):
    """With random numbers that do not depend on the ranks, and three rows of an adapter on two."""
    arguments = {"config": lora_config.model_dump_json(), "steps": STEPS}
    one = ranks.run(1, "trainer", run_dir=str(tmp_path), **arguments)
    _assert_same_training("trained", [one], [by_two["lora"]])
    _assert_close(_weights(tmp_path, "trained"), _weights(folder / "lora-two", "trained"))
    assert sum(by_two["lora"]["elements"]) == one["elements"][0]
    assert all(".lora_" in name for name in _weights(tmp_path, "trained"))


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


@pytest.fixture(scope="module")
def configs_of_groups(folder, config):
    """Of the scenarios with groups."""
    odd = tiny_config(folder, tokens_per_microbatch=30).model_dump(mode="json")
    odd["train"]["algorithm"] = "dpo"
    odd["data"] |= {"chosen_field": "chosen", "rejected_field": "rejected"}
    odd["rollout"] |= {"source": "recorded", "group_size": 2}
    plain = config.model_dump_json()
    pairs = Config.model_validate(odd).model_dump_json()
    return {"bad_group": plain, "own_rows": plain, "held_out": pairs}


@pytest.fixture(scope="module")
def groups_of_two(configs_of_groups):
    """What one replica of two ranks says of them, by scenario."""
    each = [(name, {"config": config}) for name, config in configs_of_groups.items()]
    return dict(zip(configs_of_groups, ranks.run_each(2, each), strict=True))


@pytest.fixture
def alone(configs_of_groups):
    """What one rank says of one of them."""
    return lambda name: ranks.run(1, name, config=configs_of_groups[name])


def test_a_bad_group_ends_no_rank_and_is_in_nobodys_gradients(groups_of_two, alone):
    said = groups_of_two["bad_group"]
    assert len(said["refused"]) == 2
    assert all("group t6" in line for line in said["refused"]), said["refused"]
    assert said["version"] == 1
    assert said["norm"] == pytest.approx(alone("bad_group")["norm"], rel=1e-4)


def test_each_rank_reads_the_groups_of_its_rows_and_no_payload_travels_between_ranks(
    groups_of_two, alone
):
    said = groups_of_two["own_rows"]
    assert len(said["read"]) == 2
    mine, other = map(set, said["read"])
    assert mine | other == {f"t{n}" for n in range(5, 10)}
    assert mine != other and len(mine) < 5 and len(other) < 5
    assert said["payloads"] > 100_000 > 10 * said["largest"]
    assert said["norm"] == pytest.approx(alone("own_rows")["norm"], rel=1e-3)


def test_two_ranks_measure_held_out_pairs_as_one_does(groups_of_two, alone):
    """An odd number of rows: a rank without one of its own takes part and counts nothing."""
    two, one = groups_of_two["held_out"], alone("held_out")
    assert "group t" in two["refused"]
    assert one["found"].keys() == two["found"].keys()
    for name, entry in one["found"].items():
        assert two["found"][name][:2] == pytest.approx(entry[:2], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])  # in every run: 1
def test_a_row_that_does_not_fit_ends_the_replica_at_once_and_is_named(tmp_path, rank):
    """The other rank is in a collective of the same row and would wait there for half an hour."""
    config = tiny_config(tmp_path, tokens_per_microbatch=64).model_dump_json()
    status, err = ranks.fork(2, "out_of_memory", config=config, at=rank).end()
    assert status == 1, err
    (said,) = [line for line in err.splitlines() if "80.00 GiB" in line]
    assert f"rank {rank}" in said and "t6" in said and "tokens, prompts included" in said, said
