"""Memory plan against the bytes that models and their backward passes really hold."""

import math
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.config.sections.inputs import LoraConfig
from paceline.config.template import ALGORITHMS, template
from paceline.config.template import SIZES as TEMPLATES
from paceline.errors import BadInput
from paceline.lora import adapter_shapes
from paceline.memory_plan import (
    GIB,
    NCCL,
    PARKED,
    RESERVE,
    SHARES_GPU,
    STAGED,
    Gpu,
    engine_share,
    fits_side_by_side,
    host_bytes,
    memory_plan,
    named_gpu,
    problems,
    room_of_a_turn,
    scorer_room,
    scorers_of_a_pair,
    settled,
)
from paceline.model_shape import read_shape, scorer_shapes, shape_of
from paceline_launcher.cli import app
from paceline_launcher.preflight import machine
from paceline_launcher.preflight.machine import gpu_memory
from policy_worker.model import attention
from policy_worker.model.row_layout import Forest, Packing
from policy_worker.rows.packing import settle_rows
from policy_worker.rows.replica import Replica
from policy_worker.step.optimizer import build_optimizer
from rollout_worker.engine.model import cache_budget
from testbed.architectures import ARCHITECTURES, tiny_config
from testbed.planner.systems import active_parameters
from testbed.tiny_model import make_tiny_model
from tests.fixtures.configs import config_of

SIZES = {"qwen3": (3, 128), "llama": (5, 256)}
QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,  # noqa: E501
    "max_position_embeddings": 40960,
}  # fmt: skip
QWEN25_7B = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}  # fmt: skip

QWEN3_32B = {
    **QWEN3_06B,
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,  # noqa: E501
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN25_72B = {
    **QWEN25_7B,
    "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,  # noqa: E501
    "num_key_value_heads": 8,
}  # fmt: skip


def settings(**sections):
    return config_of(**sections | {"model": {"dtype": "float32", **sections.get("model", {})}})


def random_config(family):
    layers, hidden = SIZES[family]
    return AutoConfig.for_model(
        family, vocab_size=100, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,  # noqa: E501
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=512,  # noqa: E501
    )  # fmt: skip


@pytest.mark.parametrize("family", SIZES)
def test_state_is_what_a_rank_holds(family):
    config = settings()
    model = AutoModelForCausalLM.from_config(random_config(family))
    optimizer = build_optimizer({"policy": model}, config.train)
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    weights = sum(p.nbytes for p in model.parameters())

    found = memory_plan(config, shape_of(random_config(family), "float32"))[0].gpu

    assert found["weights"] == found["gradients"] == found["reduction scratch"] == weights
    assert found["optimizer moments"] == sum(t.nbytes for t in moments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SIZES)
def test_activations_are_within_a_tenth_of_what_a_backward_pass_keeps(family, dtype):
    tokens = 256
    attention.register()
    stored = random_config(family)
    model = AutoModelForCausalLM.from_config(
        stored, attn_implementation=attention.BLOCKS, dtype=getattr(torch, dtype)
    )
    model.train()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    places = torch.arange(tokens)
    nothing, half = np.zeros(2, np.int64), np.full(2, tokens // 2)
    forest = Forest.planted(nothing - 1, nothing, half, np.arange(2))
    packing = Packing(forest, np.arange(2), places)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(
            input_ids=places[None] % 100,
            position_ids=places[None] % (tokens // 2),
            packing=packing,
            use_cache=False,
        )
    real = sum(size for at, (size, _) in kept.items() if at not in own)

    config = settings(model={"dtype": dtype}, train={"tokens_per_microbatch": tokens})
    plan = memory_plan(config, shape_of(stored, dtype))[0].gpu
    planned = sum(plan[name] for name in plan if name.startswith("activations"))
    assert planned == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize(
    ("numbers", "family", "count"),
    [
        (QWEN3_06B, "qwen3", 596_049_920),
        (QWEN3_32B, "qwen3", 32_762_123_264),
        (QWEN25_7B, "qwen2", 7_615_616_512),
        (QWEN25_72B, "qwen2", 72_706_203_648),
    ],
)
def test_published_models_have_their_number_of_parameters(numbers, family, count):
    """The counts are those of the models' cards and weight files."""
    assert shape_of(AutoConfig.for_model(family, **numbers), "bfloat16").parameters == count


def test_ranks_gather_in_bfloat16_and_one_alone_has_copies():
    shape = shape_of(random_config("qwen3"), "bfloat16")
    half = {"dtype": "bfloat16"}
    alone = memory_plan(settings(model=half), shape)[0].gpu
    whole, sharded = (
        memory_plan(settings(model=model, fleet={"policy_ranks": 4}), shape)[0].gpu
        for model in ({}, half)
    )
    assert alone["copies of the weights"] == 2 * shape.parameters
    assert "copies of the weights" not in sharded
    weights = 2 * shape.block_parameters + shape.root_parameters
    assert whole["gathered blocks"] - sharded["gathered blocks"] == 2 * weights


def test_adapters_alone_have_gradients_and_moments_and_their_base_is_the_reference():
    shape = shape_of(random_config("qwen3"), "bfloat16")
    adapters = replace(shape, adapters=1000)
    half, kl = {"dtype": "bfloat16"}, {"kl_coef": 0.1}
    whole, few = (memory_plan(settings(model=half, train=kl), found) for found in (shape, adapters))
    assert "reference" in whole[0].gpu and "reference" not in few[0].gpu
    assert few[0].gpu["frozen base"] == 2 * shape.parameters
    assert few[0].gpu["optimizer moments"] == 2 * few[0].gpu["weights"] == 8000
    assert few[1].host["received weights"] < 0.1 * whole[1].host["received weights"]


def test_weights_that_stay_gathered_are_counted_once_and_have_a_remedy():
    shape = shape_of(random_config("qwen3"), "float32")
    fleet = {"policy_ranks": 4}
    again, kept = (
        memory_plan(settings(fleet=fleet, train={"reshard_after_forward": given}), shape)[0]
        for given in (True, False)
    )
    assert again.gpu["gathered blocks"] < kept.gpu["gathered weights"] == 4 * shape.parameters
    assert len(kept.gpu) == len(again.gpu) == len(kept.gpu | again.gpu) - 1
    assert any("reshard_after_forward" in change for change in kept.remedies)
    assert not any("reshard_after_forward" in change for change in again.remedies)


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("offload_optimizer", "optimizer moments"),
        ("offload_frozen", "reference"),
        ("offload_activations", "inputs of blocks"),
        ("offload_publishing", "published weights"),
    ],
)
def test_what_is_offloaded_is_on_the_host_and_no_longer_on_the_device(setting, part):
    shape = shape_of(random_config("qwen3"), "float32")
    model, whole = {"gradient_checkpointing": True}, 4 * shape.parameters
    here, there = (
        memory_plan(settings(model=model, train={"kl_coef": 0.1, setting: given}), shape)[0]
        for given in (False, True)
    )
    moved = there.host[part]
    assert here.gpu[part] - there.gpu.get(part, 0) == moved
    assert part not in there.gpu
    inputs = 4 * 8192 * shape.hidden * shape.layers
    sizes = {"reference": whole, "inputs of blocks": inputs, "published weights": 2 * whole}
    assert moved == sizes.get(part, moved)
    assert any(setting in change for change in here.remedies)
    assert not any(setting in change for change in there.remedies)


def test_ranks_divide_the_state_and_what_is_published_and_not_the_rows():
    shape = shape_of(random_config("qwen3"), "float32")
    one, four = (memory_plan(settings(fleet={"policy_ranks": ranks}), shape)[0] for ranks in (1, 4))
    assert four.gpu["activations"] == one.gpu["activations"]
    assert four.gpu["gathered blocks"] > 0
    for part in ("optimizer moments", "published weights", "encoded deltas", "checkpoint"):
        held = [plan.gpu.get(part) or plan.host[part] for plan in (one, four)]
        assert held[1] == held[0] // 4


@pytest.mark.parametrize("name", ["h1000", "0g", "-1g", "g", "80gb"])
def test_unknown_gpu_is_refused_with_the_list(name):
    with pytest.raises(BadInput, match="h100-80g"):
        named_gpu(name)


def test_command_says_by_part_what_does_not_fit(tmp_path):
    AutoConfig.for_model("qwen2", **QWEN25_7B).save_pretrained(tmp_path / "model")
    run = tmp_path / "run.toml"
    run.write_text(f'[model]\npath = "{tmp_path}/model"\n[data]\npath = "unused"\n')
    given = ["plan", "memory", str(run), "--gpu"]
    (check,) = gpu_memory(load_config(run), named_gpu("h100-80g"))
    assert check.state == "fail" and "policy rank" in check.found
    assert "fleet.policy_ranks" in check.remedy

    found = CliRunner().invoke(app, [*given, "h100-80g"])
    assert found.exit_code == 1
    assert "7.62 B parameters" in found.stdout and "h100-80g" in found.stdout
    (weights,) = re.findall(r"^  weights +([0-9.]+) GiB$", found.stdout, re.MULTILINE)
    assert float(weights) == pytest.approx(4 * 7_615_616_512 / 2**30, abs=0.01)
    assert check.remedy in found.stdout
    assert CliRunner().invoke(app, [*given, "999g"]).exit_code == 0


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_each_architecture_has_a_shape_without_data_in_both_types(family):
    config = tiny_config(family)
    text = config.get_text_config()
    half, full = (shape_of(config, dtype) for dtype in ("bfloat16", "float32"))
    assert 0 < half.block_saved < full.block_saved <= full.blocks_saved < 2 * half.blocks_saved + 1
    recurrent = {"linear_attention", "conv", "mlp"} & {*(getattr(text, "layer_types", None) or ())}
    attending = half.layers - len(recurrent)
    assert half.kv_elements == 2 * attending * text.num_key_value_heads * 8


def test_a_plan_of_a_hybrid_model_has_each_kind_of_its_blocks():
    config = tiny_config("qwen3_next")
    two = shape_of(config, "bfloat16")
    config.num_hidden_layers = 4
    config.layer_types = ["linear_attention"] * 3 + ["full_attention"]
    four = shape_of(config, "bfloat16")
    assert four.kv_elements == two.kv_elements
    assert four.blocks_saved - two.blocks_saved == 2 * two.block_saved  # the recurrent kind's


def test_unreadable_model_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"config\.json cannot be read"):
        read_shape(settings(model={"path": str(tmp_path)}))


def test_a_mixture_of_experts_is_planned_by_the_experts_that_a_token_uses(tmp_path):
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=100, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8,  # noqa: E501
        num_experts_per_tok=2, max_position_embeddings=512,
    )  # fmt: skip
    few = shape_of(config, "bfloat16")
    config.save_pretrained(tmp_path)
    used = active_parameters(settings(model={"path": str(tmp_path)}), few.parameters)
    assert few.parameters - used == 3 * 6 * 3 * 64 * 32
    config.num_experts_per_tok = 4
    many = shape_of(config, "bfloat16")
    assert few.parameters == many.parameters
    assert 0 < few.block_saved < many.block_saved < 2 * few.block_saved


@pytest.mark.parametrize(
    ("weights_gib", "staged"), [(1, True), (15, True), (28, False), (90, False)]
)
def test_an_engine_leaves_room_for_the_next_version_if_its_cache_stays_large(weights_gib, staged):
    gpu = int(79.1 * GIB)
    share = engine_share(weights_gib * GIB, weights_gib * GIB, gpu)
    left = (RESERVE - share) * gpu
    assert (left >= weights_gib * GIB / STAGED) == staged
    assert staged or share == RESERVE


def test_communicators_are_those_of_mesh_and_ranks():
    shape = shape_of(random_config("qwen3"), "float32")

    def joined(fleet):
        return memory_plan(settings(fleet=fleet), shape)[0].gpu["communicators"] / NCCL

    assert joined({"policy": 1, "rollout": 3}) == 0
    assert joined({"policy": 2, "rollout": 3}) == 1
    assert joined({"policy": 2, "rollout": 3, "policy_ranks": 4}) == 2


def test_a_pair_in_turns_needs_the_larger_of_both_and_host_memory_for_the_other():
    shape = shape_of(AutoConfig.for_model("qwen3", **QWEN3_06B), "bfloat16")
    half, ample = {"dtype": "bfloat16"}, {"vllm": {}, "engine": "vllm"}
    side_by_side, turns = (
        settings(model=half, rollout=ample, fleet={"sharing": sharing})
        for sharing in ("none", "turns")
    )
    policy, engine = (sum(plan.gpu.values()) for plan in memory_plan(turns, shape))
    gpu = Gpu("one", int((max(policy, engine) + 3 * PARKED) / RESERVE))
    assert not list(problems(memory_plan(turns, shape), gpu))
    assert not fits_side_by_side(side_by_side, shape, Gpu("one", int(policy / RESERVE)))
    assert list(problems(memory_plan(turns, shape), Gpu("one", int(policy / RESERVE))))
    apart, together = (host_bytes(c, shape)["policy rank"] for c in (side_by_side, turns))
    assert together - apart >= 12 * shape.parameters  # weights and moments


def test_scorers_at_a_pairs_device_are_beside_the_engine_and_on_the_host():
    shape = shape_of(random_config("qwen3"), "float32")
    small = replace(shape, parameters=shape.parameters // 2)
    models = {"rm": {"kind": "reward_model"}, "teacher": {"kind": "logprobs"}}
    scorers = {name: {"path": "m", "batch_size": 2} | model for name, model in models.items()}
    fleet = {"sharing": "turns", "scorers": {"rm": 3, "teacher": 1}, "policy": 2, "rollout": 2}
    shapes = {"rm": small, "teacher": shape}
    config = config_of(fleet=fleet, scorers=scorers, model={"dtype": "float32"})
    policy, engine, *scored = memory_plan(config, shape, shapes)
    assert scorers_of_a_pair(config) == {"rm": 2, "teacher": 1}
    assert [(p.name, p.host["state"]) for p in scored] == [
        ("scorer rm", 4 * small.parameters),
        ("scorer teacher", 4 * shape.parameters),
    ]
    rm, teacher = (sum(plan.gpu.values()) + PARKED for plan in scored)
    pairs = {name: fleet[name] for name in ("sharing", "policy", "rollout")}
    alone = memory_plan(config_of(fleet=pairs, model={"dtype": "float32"}), shape)
    assert policy.beside - alone[0].beside == 3 * PARKED
    assert engine.beside - alone[1].beside == 2 * rm + teacher == scorer_room(config, shapes)
    full = engine.beside + sum(engine.gpu.values())
    (found,) = {f.partition(" needs")[0] for f, _ in problems([engine], Gpu("one", full))}
    assert found == "a rollout worker" and not list(problems([engine], Gpu("one", 2 * full)))
    there = sum(engine.gpu.values()) + PARKED
    assert scored[1].beside + teacher == there + alone[1].beside + scorer_room(config, shapes)
    here = host_bytes(config, shape, ["policy-0", "rollout-0", "scorer-rm-0"], shapes)
    assert here["scorer rm"] == 4 * small.parameters and not here["scorer teacher"]
    apart = {name: scorer | {"takes_turns": False} for name, scorer in scorers.items()}
    assert len(memory_plan(config_of(fleet=fleet, scorers=apart), shape, shapes)) == 2
    side = config_of(scorers=scorers)
    needed = int(sum(sum(p.gpu.values()) + PARKED for p in memory_plan(side, shape)) / RESERVE) + 1
    assert fits_side_by_side(side, shape, Gpu("one", needed))
    assert not fits_side_by_side(side, shape, Gpu("one", needed), shapes)
    several = config_of(scorers=scorers, fleet={"scorers": {"rm": 3}})
    more = Gpu("one", int(needed + (3 * rm + teacher) / RESERVE) + 1)
    assert fits_side_by_side(several, shape, more, shapes)
    assert not fits_side_by_side(several, shape, Gpu("one", more.bytes - (GIB >> 1)), shapes)
    wide = engine_share(GIB, GIB, 80 * GIB) - engine_share(GIB, GIB, 80 * GIB, 8 * GIB)
    assert wide == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(("sharing", "found"), [("none", {"rm", "apart"}), ("turns", {"rm"})])
def test_side_by_side_a_scorer_is_there_whether_it_would_take_turns(tmp_path, sharing, found):
    make_tiny_model(tmp_path, hidden=32)
    rm = {"kind": "reward_model", "path": str(tmp_path)}
    scorers = {"rm": rm, "apart": rm | {"takes_turns": False}}
    assert scorer_shapes(config_of(scorers=scorers, fleet={"sharing": sharing})).keys() == found


@pytest.mark.parametrize("there", [False, True])
def test_a_cache_leaves_room_for_scorers_once_if_they_are_there_or_come(
    tmp_path, monkeypatch, there
):
    make_tiny_model(tmp_path, hidden=32)
    scorers = {"rm": {"kind": "reward_model", "path": str(tmp_path)}}
    config = config_of(fleet={"sharing": "turns", "scorers": 4}, scorers=scorers)
    room, held, total = scorer_room(config, scorer_shapes(config)), 8 * GIB, 80 * GIB
    free = room_of_a_turn(total) - held
    assert room > 4 * PARKED
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - there * room, total))
    budget = cache_budget(config, torch.device("cuda", 0))
    assert budget == pytest.approx((free - room) / 2, abs=1)
    foreign = free - room - GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (foreign, total))
    assert cache_budget(config, torch.device("cuda", 0)) == foreign // 2


@pytest.mark.parametrize("gpu", [Gpu("one", 1 << 36), None])
@pytest.mark.parametrize("here", [None, ("policy-3", "rollout-3", "scorer-rm-3")])
def test_a_host_without_room_for_parked_states_is_refused(tmp_path, monkeypatch, gpu, here):
    """``here``: workers that are placed on this node; None: all are. Without a GPU, too."""
    make_tiny_model(tmp_path, hidden=32)
    model = {"path": str(tmp_path), "device": "cpu" if gpu is None else "auto"}
    pairs = {"sharing": "turns", "policy": 4, "rollout": 4, "scorers": 4}
    ppo = {"train": {"algorithm": "ppo", "kl_coef": 0.1}}
    scorers = {"rm": {"kind": "reward_model", "path": str(tmp_path)}}
    config = config_of(model=model, fleet=pairs, scorers=scorers, **ppo)
    alone = config_of(model=model, fleet={"sharing": "turns"}, scorers=scorers, **ppo)
    of_each = host_bytes(alone, read_shape(alone), scorers=scorer_shapes(alone))
    assert of_each["policy rank"] > 2 * 12 * read_shape(alone).parameters  # with its critic
    needed = sum(of_each.values()) * (4 if here is None else 1)
    for total, refused in ((needed - 1, True), (needed, False)):
        monkeypatch.setattr(machine, "_memory", lambda total=total: total)
        checks = gpu_memory(config, gpu, here)
        found = [f for f in checks if f.state == "fail"]
        assert [
            ('sharing = "turns"' in f.found, "scorer rm" in f.found, bool(f.remedy)) for f in found
        ] == [(True, True, True)] * refused


MODELS = {
    "small": ("qwen3", QWEN3_06B),
    "7b": ("qwen2", QWEN25_7B),
    "32b": ("qwen3", QWEN3_32B),
    "70b": ("qwen2", QWEN25_72B),
}
"""Numbers of the models that templates name on the hub; tiny trains an example of 0.1 M parameters.
"""
TOO_LARGE = {("32b", "ppo"), ("70b", "ppo")}
"""Policy and critic of these sizes need GPUs of 141 GB."""


@pytest.fixture(scope="module")
def shapes():
    stored = {size: AutoConfig.for_model(f, **numbers) for size, (f, numbers) in MODELS.items()}
    found = {size: shape_of(config, "bfloat16") for size, config in stored.items()}
    for size, config in stored.items():
        added = adapter_shapes(config, LoraConfig(rank=32)).values()
        found[size, "lora"] = replace(found[size], adapters=sum(map(math.prod, added)))
    return found


@pytest.mark.parametrize(
    ("gpu", "given", "rows"),
    [
        ("h200-141g", {}, (32_768, False)),
        ("h100-80g", {}, (16_384, False)),
        ("l40s-48g", {}, (8192, False)),
        ("l4-24g", {}, (8192, True)),
        ("2g", {}, (5120, True)),  # none fits, and none is shorter than a sequence
        ("h100-80g", {"model": {"gradient_checkpointing": True}}, (32_768, True)),
        ("l4-24g", {"model": {"gradient_checkpointing": False}}, (5120, False)),
        ("h100-80g", {"train": {"tokens_per_microbatch": 2048}}, (2048, False)),
        ("l4-24g", {"train": {"tokens_per_microbatch": 16_384}}, (16_384, True)),
    ],
)
def test_rows_are_as_long_as_there_is_room_and_recompute_if_they_must(gpu, given, rows, shapes):
    given = {**given, "model": {"dtype": "bfloat16", **given.get("model", {})}}
    found = settled(settings(**given), shapes["small"], named_gpu(gpu))
    assert (found.train.memory.row_tokens, found.model.recomputes) == rows


class OfTwo(Replica):
    """The other rank has room for less."""

    def gather(self, value):
        return [value, (8192, True)]


@pytest.mark.parametrize(
    ("replica", "shares", "rows"),
    [
        (Replica(), False, (16_384, False)),
        (OfTwo(), False, (8192, True)),
        (Replica(), True, (8192, False)),
    ],
)
def test_a_worker_settles_its_rows_once_and_says_so(
    replica, shares, rows, tmp_path, monkeypatch, caplog
):
    AutoConfig.for_model("qwen3", **QWEN3_06B).save_pretrained(tmp_path)
    config = settings(model={"dtype": "auto", "path": str(tmp_path)})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    if shares:
        monkeypatch.setenv(SHARES_GPU, "1")
    caplog.set_level("INFO")
    found = settle_rows(config, replica, torch.device("cuda", 0))
    memory, model = found.train.memory, found.model
    assert (memory.tokens_per_microbatch, model.gradient_checkpointing) == rows
    assert caplog.text.count("rows settled") == 1
    assert settle_rows(found, replica, torch.device("cuda", 0)) is found
    assert settle_rows(config, replica, torch.device("cpu")) is config


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", MODELS)
def test_template_fits_the_gpus_that_it_names(size, algorithm, lora, shapes):
    text = template(size=size, algorithm=algorithm, out="run.toml", lora=lora)
    config = Config.model_validate(tomllib.loads(text))
    assert set(MODELS) == set(TEMPLATES) - {"tiny"}
    assert "80 GB" in text
    gpu = named_gpu("h100-80g")
    if size == "small" and not config.recorded:  # vLLM takes its share of the same GPU
        left = 1 - config.rollout.vllm["gpu_memory_utilization"]
        gpu = Gpu(gpu.name, int(gpu.bytes * left))
    plans = memory_plan(config, shapes[(size, "lora") if lora else size])
    if (size, algorithm) in TOO_LARGE:
        assert list(problems(plans, gpu))
        gpu = named_gpu("h200-141g")
    assert not list(problems(plans, gpu))
