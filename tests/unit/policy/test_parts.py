"""Parts of a state: scalar heads, and everything that must hold, move and save all of them."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from policy_worker.checkpoint.checkpoint import CheckpointError
from policy_worker.checkpoint.export import ExportError, export
from policy_worker.checkpoint.shards import WEIGHTS, stored_tensors
from policy_worker.model.heads import values
from policy_worker.model.policy_model import ModelError, load_model
from policy_worker.objectives.load import ObjectiveError, load_objective
from policy_worker.objectives.objective import Objective, Part
from policy_worker.publisher import PublishingPlace
from policy_worker.ranks.sharding import load_sharded_state
from policy_worker.ranks.state_transfer import state_tensors
from policy_worker.rows.group_reading import decode
from policy_worker.rows.packing import pack
from policy_worker.rows.replica import Replica
from policy_worker.trainer import Trainer
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config, random_groups
from tests.fixtures.train_states import all_bits, assert_same_bits
from tests.fixtures.training_steps import CPU, form_alone, train_step

BOTH, ALONE = (f"tests.fixtures.two_parts:{name}" for name in ("PolicyAndValue", "ScalarAlone"))
SETTINGS = {"lr": 1e-2, "max_grad_norm": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("m") / "lm", hidden=32))


@pytest.fixture(scope="module")
def classifier(model, tmp_path_factory):
    """A sequence classifier with one label and a head that is not zero, as reward models are
    published."""
    path = tmp_path_factory.mktemp("m") / "classifier"
    torch.manual_seed(1)
    found = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    torch.nn.init.normal_(found.score.weight)
    found.save_pretrained(path)
    return str(path)


def config_of(model, algorithm=BOTH, **train):
    return make_config(model=model, train={**SETTINGS, "algorithm": algorithm, **train})


def trained(config, steps=2):
    trainer = Trainer(config, CPU)
    form_alone(trainer)
    trainer.restore("", 0, 0)
    for step in range(1, steps + 1):
        train(trainer, step)
    return trainer


def train(trainer, step):
    groups = random_groups(4, group_size=3, seed=step, first=10 * step, vocab=15)
    return train_step(trainer, groups, step)


# ---- scalar heads


def load_critic(path):
    field = "objective.critic_path"
    return load_model(str(path), make_config().model, CPU, head="scalar", field=field)


@pytest.mark.parametrize("at", ["token", "before"])
def test_a_scalar_head_on_a_packed_row_equals_transformers_on_each_sequence_alone(classifier, at):
    head = load_model(classifier, make_config().model, CPU, head="scalar")
    plain = AutoModelForSequenceClassification.from_pretrained(classifier)
    plain.config.pad_token_id = None  # it pools the last token that is not padding
    groups = random_groups(3, group_size=4, seed=5, longest=12, vocab=15)
    batch = decode(groups)
    order = np.arange(len(batch.length))
    row = pack(batch, order, CPU, last_tokens=at == "token")
    found = values(head, row, at).split(batch.length.tolist())
    sequences = [(g, c) for g in groups for c in g.completions]
    for got, (group, completion) in zip(found, sequences, strict=True):
        prompt = np.frombuffer(group.prompt_tokens, "<i4")
        tokens = np.frombuffer(completion.tokens, "<i4")
        # One prefix at a time: the classifier pools the last token of what it is given.
        ends = [len(prompt) + n + (at == "token") for n in range(len(tokens))]
        whole = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
        with torch.no_grad():
            wanted = torch.stack([plain(whole[None, :end]).logits[0, 0] for end in ends])
        torch.testing.assert_close(got.detach(), wanted, atol=1e-5, rtol=1e-5)


def test_the_head_of_a_language_model_is_zero_and_that_of_a_classifier_is_kept(model, classifier):
    settings = make_config().model
    fresh = load_model(model, settings, CPU, head="scalar")
    assert not fresh.score.weight.any()
    backbone = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    for name, parameter in fresh.model.named_parameters():
        assert torch.equal(parameter, backbone[f"model.{name}"]), name
    kept = AutoModelForSequenceClassification.from_pretrained(classifier)
    assert torch.equal(
        load_model(classifier, settings, CPU, head="scalar").score.weight, kept.score.weight
    )


def test_a_scalar_part_that_cannot_be_is_one_line_that_names_its_setting(model, tmp_path):
    with pytest.raises(ModelError, match=r"^objective.critic_path = .*no such directory"):
        load_critic(tmp_path / "none")
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=3).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match=r"objective.critic_path = .*3 labels.*num_labels = 1"):
        load_critic(tmp_path)


# ---- the whole state


def test_both_parts_learn_and_each_is_clipped_by_its_own_norm(model):
    trainer = trained(config_of(model), steps=0)
    before = {name: t.clone() for name, t in trainer.state.named_weights()}
    assert train(trainer, 1).entries.keys() >= {"grad_norm", "grad_norm_critic", "value_error"}
    stats = train(trainer, 2)
    changed = {
        name.partition("/")[0]
        for name, tensor in trainer.state.named_weights()
        if not torch.equal(tensor, before[name]) and "/" in name
    }
    assert changed == {"critic"}
    assert not torch.equal(
        before["model.embed_tokens.weight"],
        dict(trainer.state.named_weights())["model.embed_tokens.weight"],
    )
    assert stats.entries["grad_norm"] != stats.entries["grad_norm_critic"]


def test_a_part_has_its_multiple_of_the_learning_rate(model):
    """AdamW's first update is the learning rate, whatever the gradient."""
    trainer = trained(config_of(model, max_grad_norm="none"), steps=0)
    before = {name: t.clone() for name, t in trainer.state.named_weights()}
    train(trainer, 1)
    after = dict(trainer.state.named_weights())
    policy = (after["model.embed_tokens.weight"] - before["model.embed_tokens.weight"]).abs().max()
    critic = (after["critic/score.weight"] - before["critic/score.weight"]).abs().max()
    assert float(policy) == pytest.approx(1e-2, rel=1e-3)
    assert float(critic) == pytest.approx(3e-2, rel=1e-3)


def test_a_part_whose_gradient_is_not_finite_leaves_all_parts_as_they_are(model):
    trainer = trained(config_of(model))
    before = all_bits(trainer.state)
    trainer.reduce()
    trainer.update.scratch[trainer.gradients.part_slices["critic"]] = float("nan")
    trainer.update.norms["critic"] = float("nan")
    trainer.commit(3, 1e-2)
    assert_same_bits(before, all_bits(trainer.state))


@pytest.mark.parametrize("changed", ["weight", "scalar"])
def test_the_digest_sees_every_part_and_number(model, changed):
    one, other = trained(config_of(model)), trained(config_of(model))
    assert one.digest() == other.digest()
    if changed == "weight":
        with torch.no_grad():
            other.state.parts["critic"].score.weight[0, 0] += 1e-3
    else:
        other.state.scalars["moment"] += 1e-9
    other._digest = (-1, "")
    assert one.digest() != other.digest()


def test_a_joiner_is_sent_the_tensors_of_all_parts(model):
    state = trained(config_of(model)).state
    sent = {t.data_ptr() for t in state_tensors(state)}
    for part in state.parts.values():
        for parameter in part.parameters():
            assert parameter.data_ptr() in sent
            for moment in state.optimizer.state[parameter].values():
                assert moment.data_ptr() in sent
    assert state.scalars["moment"].data_ptr() in sent


def test_only_the_policy_is_published(model):
    both = trained(config_of(model), steps=0)
    wanted = {
        name
        for name, _ in load_sharded_state(config_of(model, "grpo"), Replica(), CPU).named_weights()
    }
    assert published_by(both) == wanted
    alone = trained(config_of(model, ALONE))
    assert published_by(alone) == set()


def published_by(trainer: Trainer) -> set[str]:
    """Names of the weights in its newest snapshot."""
    publisher = trainer.open_publisher(PublishingPlace("redis://nowhere", "r", "127.0.0.1"))
    publisher.publish_state(1)
    newest = publisher._newest
    assert newest is not None
    return {spec.name for spec in newest.manifest.specs}


def saved(config, folder):
    """A trainer after two steps, and the path of its checkpoint."""
    trainer = trained(config)
    trainer.attach(folder)
    return trainer, trainer.save().result(60).path


@pytest.mark.parametrize(("before", "after"), [("grpo", BOTH), (BOTH, "grpo")])
def test_a_run_begins_with_the_policy_of_another_and_with_a_critic_of_its_own(
    model, tmp_path, before, after
):
    one, path = saved(config_of(model, before), tmp_path)
    other = Trainer(config_of(model, after), CPU)
    other.attach(tmp_path)
    critic = {n: t.clone() for n, t in other.state.named_weights() if n.startswith("critic/")}
    other.checkpointer.begin_with(other.state, path)
    found = dict(other.state.named_weights())
    assert_same_bits(dict(one.state.weights_of("policy")), dict(other.state.weights_of("policy")))
    assert_same_bits(critic, {name: found[name] for name in critic})
    assert bool(critic) == (after == BOTH)


def test_a_policy_does_not_begin_with_a_reward_model(model, tmp_path):
    _, path = saved(config_of(model, ALONE), tmp_path)
    plain = Trainer(config_of(model, "grpo"), CPU)
    plain.attach(tmp_path)
    with pytest.raises(CheckpointError, match="of another model"):
        plain.checkpointer.begin_with(plain.state, path)


def test_a_critic_of_another_architecture_is_not_half_loaded(model, tmp_path, monkeypatch):
    trainer, path = saved(config_of(model), tmp_path)
    lacks = stored_tensors(path)
    del lacks[f"{WEIGHTS}critic/model.norm.weight"]
    monkeypatch.setattr("policy_worker.checkpoint.checkpoint.stored_tensors", lambda _: lacks)
    with pytest.raises(CheckpointError, match=r"critic/model\.norm\.weight is in only one"):
        trainer.checkpointer.begin_with(trainer.state, path)


@pytest.mark.parametrize(
    ("algorithm", "part"), [(BOTH, "critic"), (ALONE, None), (ALONE, "reward")]
)
def test_an_exported_scalar_part_gives_the_same_numbers_in_transformers(
    model, tmp_path, algorithm, part
):
    trainer, path = saved(config_of(model, algorithm), tmp_path)
    out = export(path, None, tmp_path / "out", part=part)
    loaded = AutoModelForSequenceClassification.from_pretrained(out)
    mine = trainer.state.parts[part or "reward"]
    tokens = torch.tensor([[5, 6, 7, 3]])
    assert mine.score.weight.any()
    torch.testing.assert_close(loaded(tokens).logits, mine(tokens).logits, atol=1e-6, rtol=0)


def test_a_part_that_is_not_there_is_named_with_those_that_are(model, tmp_path):
    trainer, path = saved(config_of(model), tmp_path)
    with pytest.raises(ExportError, match="'judge': choose one of policy, critic"):
        export(path, None, tmp_path / "out", part="judge")
    policy = AutoModelForCausalLM.from_pretrained(export(path, None, tmp_path / "policy"))
    assert_same_bits(dict(trainer.state.weights_of("policy")), dict(policy.named_parameters()))


# ---- objectives


@pytest.mark.parametrize(
    ("trains", "why"),
    [
        ((), "trains names no part"),
        ((Part("actor"),), "a trained language model is named policy"),
        ((Part("policy"), Part("policy")), "two parts are named policy"),
        ((Part("policy", head="scalar"),), "the part policy has the head scalar"),
        ((Part("../x", head="scalar"),), "a name of small letters"),
    ],
)
def test_parts_that_cannot_be_are_named(monkeypatch, model, trains, why):
    monkeypatch.setattr(Objective, "trains", trains)
    with pytest.raises(ObjectiveError, match=why):
        load_objective(config_of(model, "grpo"))
