"""A reduction that begins during the last backward gives what one after it gives, and its failures
cost no gradient."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from policy_worker.step import reduction
from policy_worker.step.gradients import RowOutOfMemory
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
    monkeypatch.setattr(reduction, "BUCKET", BUCKET)
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
    assert trainer._scratch is not None
    return trainer._scratch.clone()


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
    memory = trainer._scratch.data_ptr()
    held = trainer._scratch
    trainer.abandon()
    form_alone(trainer, next(EPOCHS))
    trainer.reduce()
    assert trainer._scratch.data_ptr() != memory
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
    with pytest.raises(RowOutOfMemory):
        step(trainer, side)
    assert trainer.rank == -1
    with pytest.raises(EpochCancelled):
        trainer.reduce()


def fail_after(side: Doubling) -> None:
    if side.calls:
        raise torch.OutOfMemoryError("no memory")
