"""Every model is tried before it is trained: what it computes decides, not its name."""

import pytest
import torch
from torch.nn.functional import dropout
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from policy_worker.model import attention
from policy_worker.model.heads import make_scorer, make_value_head
from policy_worker.model.policy_model import ModelError, _prepared, load_model
from policy_worker.objectives.objective import Part
from policy_worker.ranks.sharding import load_sharded
from policy_worker.rows.probe import Unfit, probe
from policy_worker.rows.replica import Replica
from tests.fixtures.policy_models import make_config, tiny_network

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": [1, 2],
    "sliding_window": 16,
}
RANDOM = {
    **dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout"), 0.1),
    **dict.fromkeys(("dropout", "hidden_dropout", "router_jitter_noise"), 0.1),
}


def network(family, kind=AutoModelForCausalLM, **changes):
    """A random model of ``family``, with all the dropout and noise that it knows."""
    attention.register()
    config = AutoConfig.for_model(family)
    given = {**SHAPE, **RANDOM, **changes}
    config = AutoConfig.for_model(family, **{k: v for k, v in given.items() if hasattr(config, k)})
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind.from_config(config, attn_implementation=attention.BLOCKS)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tried(model, *, head="lm", checkpointing=True):
    if head == "scalar":
        make_value_head(model)
    else:
        make_scorer(model)
    settings = make_config().model.model_copy(update={"gradient_checkpointing": checkpointing})
    probe(_prepared(model, settings, CPU, trainable=True), head, CPU)


@pytest.mark.parametrize("family", ["opt", "seed_oss", "starcoder2", "mixtral"])
def test_dropout_and_noise_of_training_are_off_whatever_they_are_called(family):
    for checkpointing in (True, False):
        tried(network(family), checkpointing=checkpointing)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_scalar_head_is_tried_and_left_as_it_was(trainable):
    model = network("qwen3", AutoModelForSequenceClassification)
    with torch.no_grad():
        model.score.weight.zero_()
    make_value_head(model)
    probe(_prepared(model, make_config().model, CPU, trainable=trainable), "scalar", CPU)
    assert not model.score.weight.any() and model.config._attn_implementation == attention.BLOCKS
    assert model.config.sliding_window in (None, SHAPE["sliding_window"])


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gemma2", "softcap"),
        ("modernbert-decoder", "prediction head"),
        ("nemotron", "does not pass it the row's packing"),
    ],
)
def test_attention_that_packed_rows_cannot_give_is_refused(family, why):
    with pytest.raises(Unfit, match=why):
        tried(network(family))


def test_a_window_in_the_mask_alone_is_refused_unless_no_sequence_reaches_it():
    model = network("phimoe")
    with pytest.raises(Unfit, match="window"):
        tried(model)
    probe(model, "lm", CPU, longest=SHAPE["sliding_window"])


def test_positions_that_follow_the_longest_sequence_of_a_row_are_refused():
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    rope["original_max_position_embeddings"] = 16
    model = network("phi3", rope_parameters=rope, original_max_position_embeddings=16)
    with pytest.raises(Unfit, match="positions"):
        tried(model)
    probe(model, "lm", CPU, longest=16)
    assert model.config.rope_parameters["original_max_position_embeddings"] == 16


def noisy(layer, hidden):
    return dropout(hidden, 0.3, training=True)


def shifted(layer, hidden):
    return hidden + hidden.roll(1, dims=1)


@pytest.mark.parametrize(
    "change, why",
    [(noisy, "draws random numbers"), (shifted, "see one another")],
    ids=["noise", "neighbours"],
)
def test_a_layer_with_a_life_of_its_own_is_refused(change, why):
    model = tiny_network("qwen3", scorer=False)
    mlp = model.model.layers[0].mlp
    mlp.register_forward_hook(lambda layer, _, out: change(layer, out))
    with pytest.raises(Unfit, match=why):
        tried(model)


def test_a_part_that_is_unfit_is_named_by_its_setting(tmp_path):
    network("modernbert-decoder").save_pretrained(tmp_path)
    config = make_config()
    unfit = Part("reference", path=str(tmp_path), field="train.loss.reference_path")
    with pytest.raises(ModelError, match=r"train\.loss\.reference_path.*architecture"):
        load_sharded(unfit, config, Replica(), CPU, trainable=False)


def test_a_part_that_takes_fewer_tokens_than_the_rows_have_is_refused(tmp_path):
    for name, tokens in (("model", 640), ("reference", 24)):
        network("gpt2", max_position_embeddings=tokens).save_pretrained(tmp_path / name)
    config = make_config(model=tmp_path / "model")
    short = Part("reference", path=str(tmp_path / "reference"), field="train.loss.reference_path")
    with pytest.raises(ModelError, match=r"reference_path.*takes 24 tokens.*max_context"):
        load_sharded(short, config, Replica(), CPU, trainable=False)


@pytest.mark.parametrize("family", ["gptj", "falcon"])
def test_attention_of_its_own_is_the_reason(family, tmp_path):
    small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4, "vocab_size": 20}
    if family == "falcon":
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(
        family, **small, **({} if "vocab_size" in small else {"vocab_size": 20})
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="attention of their own"):
        load_model(str(tmp_path), make_config().model, CPU)


def test_a_model_that_one_rank_trains_in_bfloat16_is_tried_in_it(tmp_path, monkeypatch):
    tiny_network("qwen3").save_pretrained(tmp_path)
    config = make_config(model=tmp_path, model_section={"dtype": "bfloat16"})
    model = load_sharded(Part("policy"), config, Replica(), CPU, trainable=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    forward = Qwen3MLP.forward
    mixes = lambda layer, x: forward(layer, x) @ torch.eye(x.shape[-1])  # noqa: E731
    monkeypatch.setattr(Qwen3MLP, "forward", mixes)  # float32 and bfloat16 in one product
    with pytest.raises(ModelError, match="fails on packed rows"):
        load_sharded(Part("policy"), config, Replica(), CPU, trainable=True)
