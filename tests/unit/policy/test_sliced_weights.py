"""Weights that are read slice by slice are those that transformers reads, for every kind of head
and of files."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from policy_worker.model.policy_model import empty_model, load_model
from policy_worker.objectives.objective import Part
from policy_worker.ranks.sliced_weights import SlicedWeights
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config

CPU = torch.device("cpu")
LM, SCALAR = Part("policy"), Part("critic", head="scalar")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("m") / "lm", hidden=32))


@pytest.fixture(scope="module")
def untied(tied: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Stored in bfloat16, in several files."""
    model = AutoModelForCausalLM.from_pretrained(tied, tie_word_embeddings=False)
    torch.nn.init.normal_(model.lm_head.weight)
    path = tmp_path_factory.mktemp("m") / "untied"
    model.to(torch.bfloat16).save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return str(path)


@pytest.fixture(scope="module")
def classifier(tied: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    model = AutoModelForSequenceClassification.from_pretrained(tied, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    path = tmp_path_factory.mktemp("m") / "classifier"
    model.save_pretrained(path)
    return str(path)


def everything(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("tied", LM),
        ("untied", LM),
        ("tied", SCALAR),
        ("untied", SCALAR),
        ("classifier", SCALAR),
    ],
)
def test_slices_are_bit_for_bit_what_transformers_reads(
    path: str, part: Part, request: pytest.FixtureRequest
) -> None:
    config = make_config(model=request.getfixturevalue(path))
    given = config.model.path, config.model
    model = empty_model(*given, head=part.head)
    assert all(p.is_meta for p in model.parameters())
    stored = SlicedWeights.of(config.model.path, model, scalar=part.head == "scalar")
    assert stored is not None
    stored.read(model, CPU)
    whole = load_model(*given, CPU, head=part.head)
    assert type(model).__name__ == type(whole).__name__
    assert model.training == whole.training
    found, wanted = everything(model), everything(whole)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert len(list(model.parameters())) == len(list(whole.parameters())), "tied ones are one"
    assert [p.requires_grad for p in model.parameters()] == [
        p.requires_grad for p in whole.parameters()
    ]


@pytest.mark.parametrize("harm", ["renamed", "missing", "shape", "none", "garbage", "headless"])
def test_files_that_do_not_fit_are_left_to_transformers(
    tied: str, classifier: str, tmp_path: Path, harm: str
) -> None:
    origin, part = (classifier, SCALAR) if harm == "headless" else (tied, LM)
    shutil.copytree(origin, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "score.weight" if harm == "headless" else "model.layers.0.mlp.up_proj.weight"
    if harm in ("renamed", "missing", "headless"):
        found = tensors.pop(name)
        tensors |= {"another.name": found} if harm == "renamed" else {}
    if harm == "shape":
        tensors[name] = tensors[name][1:].clone()
    file.unlink()
    if harm == "garbage":
        file.write_bytes(b"no safetensors")
    elif harm != "none":
        save_file(tensors, file)
    model = empty_model(origin, make_config(model=origin).model, head=part.head)
    assert SlicedWeights.of(str(tmp_path), model, scalar=part is SCALAR) is None
