"""A new run begins with the weights of another run's checkpoint, and with its optimizer state if
that fits."""

import json

import pytest
import torch

from policy_worker.checkpoint.checkpoint import Checkpointer, CheckpointError
from policy_worker.checkpoint.shards import stored_tensors
from policy_worker.trainer import Trainer
from testbed.tiny_model import make_tiny_model
from tests.fixtures.train_states import (
    all_bits,
    assert_same_bits,
    synthetic_step,
    tiny_config,
    tiny_state,
)


@pytest.fixture
def earlier(tmp_path):
    """Bits and checkpoint of a run after three steps."""
    config = tiny_config(tmp_path)
    state = tiny_state(config)
    for _ in range(3):
        synthetic_step(state)
    checkpointer = Checkpointer(tmp_path / "earlier", config)
    path = checkpointer.save_async(state).result(60).path
    checkpointer.close()
    return all_bits(state), path


def beginning_with(config, path):
    model = config.model.model_copy(update={"initial_checkpoint": str(path)})
    return config.model_copy(update={"model": model})


def trainer_of(config, tmp_path, **options):
    trainer = Trainer(config, torch.device("cpu"), **options)
    trainer.attach(tmp_path / "new")
    return trainer


def test_a_run_begins_with_weights_and_moments_also_after_all_replicas_were_lost(tmp_path, earlier):
    bits, path = earlier
    heard = []
    trainer = trainer_of(
        beginning_with(tiny_config(tmp_path), path), tmp_path, on_progress=lambda: heard.append(1)
    )
    trainer.restore("", 0, 0)
    assert len(heard) >= 2, "a large one takes longer than a worker may be silent"
    assert_same_bits(all_bits(trainer.state), bits)
    assert (trainer.state.step, trainer.state.version) == (0, 0)
    synthetic_step(trainer.state)
    trainer.restore("", 0, 5)
    assert_same_bits(all_bits(trainer.state), bits)
    assert (trainer.state.step, trainer.state.version) == (0, 5)
    trainer.close()


def test_without_fitting_moments_only_the_weights_are_taken_over(tmp_path, earlier, monkeypatch):
    bits, path = earlier
    stored = {name: None for name in stored_tensors(path) if not name.endswith("exp_avg_sq")}
    monkeypatch.setattr("policy_worker.checkpoint.checkpoint.stored_tensors", lambda folder: stored)
    trainer = trainer_of(beginning_with(tiny_config(tmp_path), path), tmp_path)
    trainer.restore("", 0, 0)
    found = all_bits(trainer.state)
    for name, tensor in found.items():
        if name.startswith("weight "):
            assert torch.equal(tensor, bits[name]), name
        else:
            assert not tensor.any(), name
    trainer.close()


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path, earlier):
    _, path = earlier
    other = tmp_path / "other"
    make_tiny_model(other / "tiny-model", hidden=64)
    trainer = trainer_of(beginning_with(tiny_config(other), path), tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.initial_checkpoint: .* is of another model"):
        trainer.restore("", 0, 0)
    with pytest.raises(CheckpointError, match=r"earlier.* is of another model"):
        trainer.restore(str(path), 3, 3)
    trainer.close()


def test_adapters_of_another_base_or_alpha_are_refused_by_name(tmp_path):
    config = tiny_config(tmp_path, lora={"rank": 4, "alpha": 8.0})
    checkpointer = Checkpointer(tmp_path / "earlier", config)
    path = checkpointer.save_async(tiny_state(config)).result(60).path
    make_tiny_model(tmp_path / "other" / "tiny-model", hidden=32, seed=1)
    louder = tiny_config(tmp_path, lora={"rank": 4, "alpha": 64.0})
    other = tiny_config(tmp_path / "other", lora={"rank": 4, "alpha": 8.0})
    for settings, reason in (louder, "alpha 8, and .* is 64"), (other, "another base"):
        trainer = trainer_of(beginning_with(settings, path), tmp_path)
        with pytest.raises(CheckpointError, match=reason):
            trainer.restore("", 0, 0)
    with pytest.raises(CheckpointError, match="another base"):
        trainer.restore(str(path), 0, 0)
    meta = json.loads((path / "meta.json").read_text())
    del meta["parts"][0]["base"]  # as before
    (path / "meta.json").write_text(json.dumps(meta))
    trainer.restore(str(path), 0, 0)
    trainer.close()
    checkpointer.close()
