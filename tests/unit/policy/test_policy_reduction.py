"""A reduction that begins during the last backward gives what one after it gives, and its failures
cost no gradient and use no memory twice."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.mesh import elastic_mesh as mesh_module
from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from policy_worker.objectives.batch import BadGroup
from policy_worker.step import update
from policy_worker.trainer import Trainer
from testbed.groups_in_hand import add as add_groups
from testbed.tiny_model import make_tiny_model
from tests.fixtures.policy_models import make_config, random_groups
from tests.fixtures.training_steps import CPU, begin, form_alone

BUCKET = 2_000


class Done:
    def poll(self, seconds: float) -> bool:
        return True

    def result(self) -> None:
        return None


class Doubling:
    """Stands in for a group of two members with equal gradients; notes what it is given, and
    when."""

    def __init__(self, when: Callable[[], str], fails_at: int = -1) -> None:
        self.when, self.fails_at = when, fails_at
        self.calls: list[tuple[int, int, str]] = []

    def all_reduce(self, buffer: torch.Tensor) -> Done:
        if len(self.calls) == self.fails_at:
            raise RuntimeError("connection reset")
        self.calls.append((buffer.storage_offset(), len(buffer), self.when()))
        buffer.mul_(2)
        return Done()

    def sever(self) -> None:
        pass


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(update, "BUCKET", BUCKET)
    config = make_config(
        model=make_tiny_model(tmp_path, hidden=32), train={"tokens_per_microbatch": 64}
    )
    made = Trainer(config, CPU)
    made.restore("", 0, 0)
    yield made
    made.close()


EPOCHS = itertools.count(1)
GROUPS = random_groups(4, group_size=3, seed=0, vocab=15)


def step(trainer: Trainer, side: Doubling | None = None, *, last: bool = True) -> Any:
    form_alone(trainer, next(EPOCHS))
    if side is not None:
        trainer._mesh = ProcessMesh(0, 2, CPU, lambda: False, side)  # type: ignore[arg-type]
    begin(trainer, GROUPS)
    add_groups(trainer, GROUPS, last=last)


def scratch_of(trainer: Trainer) -> torch.Tensor:
    trainer.reduce()
    assert trainer.update.scratch is not None
    return trainer.update.scratch.clone()


def phases(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Says whether a row is computed, and how many have been."""
    rows: list[str] = ["before"]
    whole = trainer.gradients._add_row

    def add_row(*arguments: Any, **named: Any) -> None:
        rows.append("row")
        whole(*arguments, **named)
        rows.append("between")

    monkeypatch.setattr(trainer.gradients, "_add_row", add_row)
    return lambda: f"{rows[-1]} {rows.count('row')}"


def test_buckets_are_reduced_in_the_last_backward_and_in_one_order(trainer, monkeypatch) -> None:
    side = Doubling(phases(trainer, monkeypatch))
    step(trainer, side)
    during = list(side.calls)
    found = scratch_of(trainer)
    rows = trainer.gradients
    assert {when for *_, when in during} == {during[0][2]}, "one row"
    assert during[0][2].startswith("row ")
    assert during[0][2] != "row 1", "the last one"
    # All but the embeddings' buckets, which a backward completes last, and the one with the sums.
    assert len(during) > len(side.calls) / 2
    offsets = [offset for offset, *_ in side.calls]
    assert offsets[:-1] == sorted(offsets[:-1], reverse=True)
    assert offsets[-1] == max(offsets)
    assert sum(size for _, size, _ in side.calls) == rows.size
    # Another member, which has nothing to compute: the same buckets in the same order.
    other = Doubling(lambda: "")
    trainer._mesh = ProcessMesh(0, 2, CPU, lambda: False, other)
    trainer.reduce()
    assert [call[:2] for call in other.calls] == [call[:2] for call in side.calls]
    # And the sum is what a reduction after the backward gives, bit for bit.
    trainer.abandon()
    trainer.gradients.clear()
    step(trainer, last=False)
    assert torch.equal(found, 2 * scratch_of(trainer))


@pytest.mark.parametrize("fails_at", [0, 2])
def test_a_failure_in_the_backward_is_raised_by_reduce_and_costs_no_gradient(
    trainer, monkeypatch, fails_at: int
) -> None:
    step(trainer, Doubling(phases(trainer, monkeypatch), fails_at))
    with pytest.raises(MeshError, match="connection reset"):
        trainer.reduce()
    form_alone(trainer, next(EPOCHS))
    begin(trainer, GROUPS)
    found = scratch_of(trainer)
    trainer.gradients.clear()
    trainer.abandon()
    step(trainer, last=False)
    assert torch.equal(found, scratch_of(trainer))


def test_a_buffer_that_is_being_reduced_is_not_used_after_the_mesh_was_left(
    trainer, monkeypatch
) -> None:
    step(trainer, Doubling(phases(trainer, monkeypatch)))
    memory = trainer.update.scratch.data_ptr()
    held = trainer.update.scratch
    trainer.abandon()
    form_alone(trainer, next(EPOCHS))
    trainer.reduce()
    assert trainer.update.scratch.data_ptr() != memory
    del held


def test_a_last_row_without_memory_leaves_the_mesh_if_a_part_was_reduced(
    trainer, monkeypatch
) -> None:
    side = Doubling(lambda: "")
    whole = trainer.gradients._add_row
    monkeypatch.setattr(
        trainer.gradients,
        "_add_row",
        lambda *a, **n: (whole(*a, **n), fail_after(side))[0],
    )
    with pytest.raises(BadGroup):
        step(trainer, side)
    assert trainer.rank == -1
    with pytest.raises(EpochCancelled):
        trainer.reduce()


def fail_after(side: Doubling) -> None:
    if side.calls:
        raise torch.OutOfMemoryError("no memory")


# ---- one that fails is done again from gradients that it never touched, in memory of its own


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
def added(trainer, monkeypatch):
    """The trainer with the gradients of a step, and with a short patience for operations."""
    monkeypatch.setattr(mesh_module, "_SETTLE_S", 0.05)
    step(trainer, last=False)
    return trainer


def fail(trainer, side, error, *, cancelled=False):
    trainer._mesh = ProcessMesh(0, 2, CPU, lambda: cancelled and bool(side.operations), side)
    with pytest.raises(error):
        trainer.reduce()


def test_an_all_reduce_is_never_retried_over_a_partly_reduced_buffer(added):
    trainer = added
    expected = scratch_of(trainer)
    memory = trainer.update.scratch.data_ptr()
    fail(trainer, BrokenSide(ends=True), MeshError)
    form_alone(trainer, next(EPOCHS))
    assert torch.equal(scratch_of(trainer), expected)
    assert trainer.update.scratch.data_ptr() == memory, "what has ended leaves its buffer for reuse"


def test_the_buffer_of_an_operation_that_does_not_end_is_never_used_again(added):
    trainer = added
    expected = scratch_of(trainer)
    side = BrokenSide(ends=False)
    fail(trainer, side, EpochCancelled, cancelled=True)
    form_alone(trainer, next(EPOCHS))
    trainer.reduce()
    for operation in side.operations:
        operation.write()
    assert torch.equal(trainer.update.scratch, expected)
    trainer.commit(1, 1e-3)
    assert all(torch.isfinite(tensor).all() for _, tensor in trainer.state.named_weights())
    for operation in side.operations:
        operation.ended = True


def test_a_gradient_that_is_not_finite_is_told_to_the_controller_and_changes_no_weight(added):
    trainer = added
    before = [p.detach().clone() for p in trainer.gradients.parameters]
    trainer.gradients.parameters[0].grad.view(-1)[0] = float("nan")
    form_alone(trainer, next(EPOCHS))
    stats = trainer.reduce()
    assert (stats.mean("update_skipped"), stats.mean("grad_norm")) == (1.0, 0.0)
    trainer.commit(1, 1e-3)
    for kept, parameter in zip(before, trainer.gradients.parameters, strict=True):
        assert torch.equal(kept, parameter)
