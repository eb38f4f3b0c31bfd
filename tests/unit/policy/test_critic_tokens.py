"""A critic of another tokenizer is refused by name: before the start, and by the policy worker that
loads it."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.config.model_files import difference
from paceline_launcher.preflight.models import model_problems
from policy_worker.model.policy_model import ModelError
from policy_worker.ranks.sharding import load_sharded_state
from policy_worker.rows.replica import Replica
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    # The same number of tokens, and two of them swapped.
    swapped = make_tiny_model(folder / "swapped", vocab="0123456789=s", hidden=32)
    smaller = make_tiny_model(folder / "smaller", vocab="0123456789s", hidden=32)
    same = make_tiny_model(folder / "same", hidden=32, seed=1)
    model = make_tiny_model(folder / "model", hidden=32)
    return {path.name: str(path) for path in (model, swapped, smaller, same)}


def config_with(models, critic):
    return make_config(
        model=models["model"],
        train={"algorithm": "ppo"},
        objective={"critic_path": models[critic]},
    )


@pytest.mark.parametrize("critic", ["swapped", "smaller"])
def test_another_tokenizer_is_refused_before_the_start_and_by_the_worker(models, critic):
    config = config_with(models, critic)
    ((found, remedy),) = model_problems(config)
    assert found.startswith("objective.critic_path: ") and "other tokens" in found
    assert "objective.critic_path" in remedy
    with pytest.raises(ModelError, match=r"^objective.critic_path = .*model.path.*name a model"):
        load_sharded_state(config, Replica(), torch.device("cpu"))


def test_a_critic_of_the_same_tokenizer_is_taken(models):
    config = config_with(models, "same")
    assert list(model_problems(config)) == []
    state = load_sharded_state(config, Replica(), torch.device("cpu"))
    theirs = AutoModelForCausalLM.from_pretrained(models["same"]).get_input_embeddings().weight
    critic = state.parts["critic"].get_input_embeddings().weight
    assert torch.equal(critic, theirs)


def test_a_critic_that_is_not_there_is_named_before_anything_starts(models, tmp_path):
    config = config_with({**models, "none": str(tmp_path / "none")}, "none")
    ((found, _),) = model_problems(config)
    assert found.startswith("objective.critic_path: ") and "no such directory" in found


def test_tokens_make_a_difference_and_neither_padding_nor_what_nobody_can_read(models, tmp_path):
    padded = AutoModelForCausalLM.from_pretrained(models["model"])
    padded.resize_token_embeddings(64)
    padded.save_pretrained(tmp_path)
    assert "embeddings of 15 and 64" in difference(models["model"], str(tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(models["model"])
    tokenizer.save_pretrained(tmp_path)
    assert difference(models["model"], str(tmp_path)) == "", "embeddings of one tokenizer"
    tokenizer.add_tokens(["<call>"])
    tokenizer.save_pretrained(tmp_path / "more")
    assert "'<call>'" in difference(models["model"], str(tmp_path / "more"))
    shutil.copy(models["model"] + "/config.json", tmp_path / "more")
    assert difference(*[str(tmp_path / "more")] * 2) == "", "it has fewer embeddings than tokens"
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tokenizer.json").write_text(json.dumps({"model": {"vocab": 3}}))
    assert difference(models["model"], str(tmp_path / "odd")) == ""
    assert difference(models["model"], "someone/not-downloaded") == ""
