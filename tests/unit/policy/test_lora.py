"""Adapters beside a frozen base: numbers of a merged model, a state of adapters alone, and the base
as reference."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.nn.functional import linear

from paceline.config.schema import Config
from paceline.config.sections.inputs import SETTINGS_FILE, LoraConfig
from paceline.lora import (
    LoraError,
    LoraLinear,
    adapters_of,
    attach,
    targets_of,
    without_adapters,
    write_peft,
)
from paceline.model_shape import blocks_of
from paceline_launcher.preflight.models import model_problems
from policy_worker.model.heads import score
from policy_worker.ranks.state_transfer import state_tensors
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from policy_worker.rows.probe import Unfit, probe
from policy_worker.trainer import Trainer
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config, random_groups, tiny_network
from tests.fixtures.train_states import all_bits, assert_same_bits
from tests.fixtures.training_steps import form_alone, keys, make_gradients, step_totals
from tests.fixtures.training_steps import train_step as train

CPU = torch.device("cpu")
GROUPS = random_groups(6, group_size=3, seed=4, vocab=15)


def lora(**settings: Any) -> dict[str, Any]:
    return {"lora": {"rank": 4, "targets": "all-linear", **settings}}


def adapted(family: str = "qwen3", **settings: Any) -> Any:
    """A tiny network whose adapters are no zeros."""
    model = tiny_network(family)
    attach(model, LoraConfig(rank=4, alpha=8.0, **settings))
    generator = torch.Generator().manual_seed(1)
    for adapter in adapters_of(model).values():
        adapter.data.normal_(0.0, 0.1, generator=generator)
    return model


def merged(model: Any, family: str) -> Any:
    """The dense model: W + scale * B A."""
    dense = tiny_network(family)
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            added = layer.scale * layer.lora_B.weight @ layer.lora_A.weight
            dense.get_submodule(name).weight.data += added.detach()
    return dense


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen2"])  # biases
def test_packed_rows_have_log_probs_and_gradients_of_the_merged_model(family: str) -> None:
    """With W' = W + s B A and G the gradient of W', that of B is s G A^T and that of A s B^T G."""
    config = make_config(model_section=lora(alpha=8.0), train={"tokens_per_microbatch": 40})
    model = adapted(family)
    dense = merged(model, family)
    batch = decode(GROUPS)
    micro = pack(batch, np.arange(len(batch.length)), CPU)
    with torch.no_grad():
        logprobs = [score(m, micro, 0.9).logprobs for m in (model, dense)]
    torch.testing.assert_close(*logprobs, atol=1e-6, rtol=1e-6)
    each = (make_gradients(config, model), make_gradients(make_config(), dense))
    for gradients in each:
        gradients.begin(step_totals(GROUPS), keys(GROUPS))
        gradients.add(GROUPS)
    assert each[0].size == sum(a.numel() for a in adapters_of(model).values())
    whole = dict(dense.named_parameters())
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            gradient, a, b = whole[f"{name}.weight"].grad, layer.lora_A.weight, layer.lora_B.weight
            wanted = (layer.scale * b.T @ gradient, layer.scale * gradient @ a.T)
            torch.testing.assert_close((a.grad, b.grad), wanted, atol=1e-6, rtol=1e-4)


OBJECTIVES: dict[str, tuple[int, dict[str, Any]]] = {
    "grpo": (3, {}),
    "ppo": (3, {}),
    "reward_model": (2, {"data": {"path": "d", "chosen_field": "c", "rejected_field": "r"}}),
    "sft": (1, {"data": {"path": "d", "completion_field": "c"}}),
    "distill": (3, {"scorers": {"teacher": {"kind": "logprobs", "path": "toy"}}}),
}
"""Completions of a group, and further sections: of recorded data, or of a teacher."""


@pytest.mark.parametrize("algorithm", OBJECTIVES)
def test_the_base_takes_two_bytes_and_adapters_and_heads_train_in_four(
    model: Path, algorithm: str
) -> None:
    size, sections = OBJECTIVES[algorithm]
    rollout = {"group_size": size, "source": "recorded" if "data" in sections else "engine"}
    section = {"dtype": "bfloat16", **lora()}
    given = {"rollout": rollout, "train": {"algorithm": algorithm}, "model_section": section}
    trainer = Trainer(make_config(model=model, **given, **sections), CPU)
    state = trainer.state
    form_alone(trainer)
    trainer.restore("", 0, 0)
    assert {tensor.dtype for _, tensor in state.frozen_base()} == {torch.bfloat16}
    assert {tensor.dtype for _, tensor in state.named_weights()} == {torch.float32}
    before, base = all_bits(state), {n: t.clone() for n, t in state.frozen_base()}
    groups = random_groups(6, group_size=size, seed=4, vocab=15)
    for completion in (c for group in groups for c in group.completions):
        # What the teacher thinks of each token: twice as likely as it was.
        logprobs = np.frombuffer(completion.logprobs, "<f4") + np.float32(np.log(2))
        completion.columns["teacher"] = logprobs.tobytes()
    for step in (1, 2, 3):  # a new head is zero, and so is the second matrix: the first comes last
        assert train(trainer, groups, step).mean("grad_norm") > 0
    assert_same_bits(dict(state.frozen_base()), base)
    still = [n for n, t in all_bits(state).items() if torch.equal(t, before[n])]
    assert not [name for name in still if name.startswith("weight ")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("m") / "base", hidden=32)


def trainer_of(model: Path, **sections: Any) -> Trainer:
    section = lora(**sections.pop("lora", {}))
    made = Trainer(make_config(model=model, model_section=section, **sections), CPU)
    form_alone(made)
    made.restore("", 0, 0)
    return made


@pytest.mark.parametrize("algorithm", ["grpo", "dpo"])
def test_the_reference_is_the_base_without_a_second_model(model: Path, algorithm: str) -> None:
    train_settings = {"algorithm": algorithm, **({"kl_coef": 0.2} if algorithm == "grpo" else {})}
    groups = random_groups(4, group_size=2 if algorithm == "dpo" else 3, seed=1, vocab=15)
    rollout = {"group_size": 2} if algorithm == "dpo" else {}
    settings = {"train": train_settings, "rollout": rollout}
    if algorithm == "dpo":
        settings["rollout"] |= {"source": "recorded"}
        settings["data"] = {"path": "d", "chosen_field": "c", "rejected_field": "r"}
    ours = trainer_of(model, **settings)
    assert ours.gradients.frozen["reference"] is ours.state.model
    copy = model.with_name("copy")
    shutil.copytree(model, copy, dirs_exist_ok=True)
    settings["train"] = train_settings | {"reference_path": str(copy)}
    theirs = trainer_of(model, **settings)
    assert theirs.gradients.frozen["reference"] is not theirs.state.model
    for step in (1, 2):
        for trainer in (ours, theirs):
            train(trainer, groups, step)
    assert_same_bits(all_bits(ours.state), all_bits(theirs.state))


@pytest.mark.parametrize("compiled", [False, True])
def test_with_adapters_off_the_model_is_its_base(compiled: bool) -> None:
    model, base = adapted(), tiny_network("qwen3")
    for block in [*blocks_of(model), *blocks_of(base)] if compiled else ():
        block.compile(dynamic=True, backend="eager")
    batch = decode(GROUPS)
    micro = pack(batch, np.arange(len(batch.length)), CPU)
    with torch.no_grad():
        wanted = score(base, micro, 1.0).logprobs
        with without_adapters(model):
            assert torch.equal(score(model, micro, 1.0).logprobs, wanted)
        ours, dense = (score(m, micro, 1.0).logprobs for m in (model, merged(model, "qwen3")))
        torch.testing.assert_close(ours, dense, atol=1e-6, rtol=1e-6)
        assert not torch.allclose(ours, wanted)


def test_the_state_is_the_adapters_alone_and_resumes_bit_for_bit(
    model: Path, tmp_path: Path
) -> None:
    """Checkpoint, digest and what a joiner gets; a critic's head belongs to it, in float32."""
    trainer = trainer_of(model, train={"algorithm": "ppo"})
    state = trainer.state
    assert state.parts["critic"].score.weight.requires_grad
    adapters = sum(a.nbytes for part in state.parts.values() for a in adapters_of(part).values())
    moved = sum(t.nbytes for t in state_tensors(state))
    assert moved < 1.05 * 3 * adapters < sum(t.nbytes for _, t in state.frozen_base())
    trainer.attach(tmp_path)
    train(trainer, GROUPS, 1)
    saved = trainer.save().result()
    digest, bits = trainer.digest(), all_bits(state)
    files = map(load_file, saved.path.glob("*.safetensors"))
    assert sum(tensor.nbytes for file in files for tensor in file.values()) == moved
    other = trainer_of(model, train={"algorithm": "ppo"})
    assert other.digest() != digest
    other.attach(tmp_path)
    other.restore(str(saved.path), 1, 1)
    assert_same_bits(all_bits(other.state), bits)
    assert other.digest() == digest
    other.park()  # with its base
    other.unpark()
    for each in (trainer, other):
        train(each, GROUPS, 2)
    assert_same_bits(all_bits(other.state), all_bits(state))
    other.restore("", 0, 0)
    fresh = trainer_of(model, train={"algorithm": "ppo"})
    assert_same_bits(all_bits(other.state), all_bits(fresh.state))


def test_replicas_on_different_bases_differ_in_their_votes(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "base", hidden=32, seed=1)
    one, two, three = trainer_of(model), trainer_of(model), trainer_of(other)
    assert_same_bits(all_bits(one.state), all_bits(three.state))
    assert one.digest() == two.digest() != three.digest()


def test_a_run_begins_with_adapters_that_peft_has_written(model: Path, tmp_path: Path) -> None:
    trainer = trainer_of(model)
    train(trainer, GROUPS, 1)
    settings = trainer.config.model.lora
    assert settings is not None
    weights = dict(trainer.state.named_weights())
    write_peft(tmp_path, weights, settings, str(model))
    again = trainer_of(model, lora={"path": str(tmp_path)})
    assert_same_bits(dict(again.state.named_weights()), weights)
    written = json.loads((tmp_path / SETTINGS_FILE).read_text())
    assert {"q_proj", "down_proj"} < set(written["target_modules"])


REFUSED = {
    "no layer": ({"targets": ["q_prj"]}, {}, r"'q_prj': Did you mean q_proj\? Name linear"),
    "head": ({"targets": ["lm_head"]}, {}, "no linear layer in the blocks"),
    "rank": ({"rank": 8, "path": "?"}, {}, "r is 4 there: set model.lora.rank"),
    "dora": ({"path": "?"}, {"use_dora": True}, "use_dora = True, which is not supported"),
    "pissa": ({"path": "?"}, {"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa', which"),
    "replicas": ({"path": "?"}, {"layer_replication": [[0, 1]]}, "layer_replication = "),
    "turned": ({"path": "?"}, {"fan_in_fan_out": True}, "fan_in_fan_out = True"),
    "late": ({"path": "?"}, {"alora_invocation_tokens": [1]}, "alora_invocation_tokens = "),
    "base": (
        {"path": "?"},
        {"base_model_name_or_path": "org/other", "paceline_base": ""},
        "are of org/other",
    ),
    "weights": ({"path": "?"}, {"paceline_base": "0" * 32}, "its adapters are of"),
    "targets": ({"path": "?", "targets": ["q_proj"]}, {}, "set model.lora.targets as in its"),
    "absent": ({"path": "/nowhere"}, {}, "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_do_not_fit_are_refused_before_weights_are_read(
    model: Path, tmp_path: Path, case: str
) -> None:
    settings, stored, problem = REFUSED[case]
    if settings.get("path") == "?":
        weights = dict(trainer_of(model).state.named_weights())
        write_peft(tmp_path, weights, LoraConfig(rank=4), str(model))
        described = json.loads((tmp_path / SETTINGS_FILE).read_text()) | stored
        (tmp_path / SETTINGS_FILE).write_text(json.dumps(described))
        settings = settings | {"path": str(tmp_path)}
    config = make_config(model=model, model_section=lora(**settings))
    ((found, _),) = model_problems(config)
    assert found.startswith("model.lora.") and re.search(problem, found), found
    with pytest.raises(LoraError, match=problem):
        Trainer(config, CPU)


def test_fused_experts_are_refused_by_name_and_other_layers_are_not() -> None:
    model = tiny_network("qwen3_moe")
    with pytest.raises(LoraError, match=r"layers\.0\.mlp\.\w+ of .*such as k_proj"):
        targets_of(model, LoraConfig(rank=4))
    assert len(targets_of(model, LoraConfig(rank=4, targets=["q_proj", "layers.1.*_proj"]))) == 5


def test_an_adapter_that_the_model_passes_by_is_refused_by_name() -> None:
    model = adapted()
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: linear(
        mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), mlp.down_proj.weight
    )
    with pytest.raises(Unfit, match=r"adapter of model\.layers\.1\.mlp\.down_proj is never asked"):
        probe(model, "lm", CPU)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rank": 0}, "rank"),
        ({}, "rank"),
        ({"rank": 1, "dropout": 0.1}, "dropout"),
        ({"rank": 1, "targets": []}, "targets"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: Any, named: str) -> None:
    section = {"path": "m", "lora": settings}
    with pytest.raises(ValidationError, match=f"lora.{named}"):
        Config.model_validate({"model": section, "data": {"path": "d"}})
