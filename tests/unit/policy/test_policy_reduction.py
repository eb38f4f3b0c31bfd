"""A reduction that fails is done again from gradients that it never touched, in memory of its
own."""

import pytest
import torch

from paceline.mesh import elastic_mesh as mesh_module
from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from policy_worker.trainer import Trainer
from testbed.groups_in_hand import add as add_groups
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config, random_groups
from tests.fixtures.training_steps import CPU, begin, form_alone


class Operation:
    """One that fails, and that may go on writing to its buffer for as long as it has not ended."""

    def __init__(self, buffer, *, ended):
        self.buffer, self.ended = buffer, ended
        self.write()

    def write(self):
        self.buffer.fill_(float("nan"))

    def poll(self, seconds):
        return self.ended

    def result(self):
        raise MeshError("connection reset")


class BrokenSide:
    """Stands in for gloo: what a lost member does to an all-reduce, at a chosen instant."""

    def __init__(self, *, ends):
        self.ends = ends
        self.operations = []

    def all_reduce(self, buffer):
        self.operations.append(Operation(buffer, ended=self.ends))
        return self.operations[-1]

    def sever(self):
        pass


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(mesh_module, "_SETTLE_S", 0.05)
    config = make_config(model=make_tiny_model(tmp_path, hidden=32))
    trainer = Trainer(config, CPU)
    form_alone(trainer)
    trainer.restore("", 0, 0)
    groups = random_groups(4, group_size=3, seed=0, vocab=15)
    begin(trainer, groups)
    add_groups(trainer, groups)
    yield trainer
    trainer.close()


def reduced(trainer):
    trainer.reduce()
    return trainer._scratch.clone()


def fail(trainer, side, error, *, cancelled=False):
    trainer._mesh = ProcessMesh(0, 2, CPU, lambda: cancelled and bool(side.operations), side)
    with pytest.raises(error):
        trainer.reduce()


def test_an_all_reduce_is_never_retried_over_a_partly_reduced_buffer(trainer):
    expected = reduced(trainer)
    memory = trainer._scratch.data_ptr()
    fail(trainer, BrokenSide(ends=True), MeshError)
    form_alone(trainer, 2)
    assert torch.equal(reduced(trainer), expected)
    assert trainer._scratch.data_ptr() == memory, "what has ended leaves its buffer for reuse"


def test_the_buffer_of_an_operation_that_does_not_end_is_never_used_again(trainer):
    expected = reduced(trainer)
    side = BrokenSide(ends=False)
    fail(trainer, side, EpochCancelled, cancelled=True)
    form_alone(trainer, 2)
    trainer.reduce()
    for operation in side.operations:
        operation.write()
    assert torch.equal(trainer._scratch, expected)
    trainer.commit(1, 1e-3)
    assert all(torch.isfinite(tensor).all() for _, tensor in trainer.state.named_weights())
    for operation in side.operations:
        operation.ended = True


def test_a_gradient_that_is_not_finite_is_told_to_the_controller_and_changes_no_weight(trainer):
    before = [p.detach().clone() for p in trainer.gradients.parameters]
    trainer.gradients.parameters[0].grad.view(-1)[0] = float("nan")
    form_alone(trainer, 2)
    stats = trainer.reduce()
    assert (stats.mean("update_skipped"), stats.mean("grad_norm")) == (1.0, 0.0)
    trainer.commit(1, 1e-3)
    for kept, parameter in zip(before, trainer.gradients.parameters, strict=True):
        assert torch.equal(kept, parameter)
