"""Memory of a weight snapshot: a sharded replica has no room for all whole tensors at once."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paceline.weights import weight_snapshot
from paceline.weights.weight_manifest import WeightsRefused
from paceline.weights.weight_snapshot import WeightSnapshot

LAYOUT = [(f"w{i}", torch.empty(100, device="meta")) for i in range(8)]


@pytest.fixture(autouse=True)
def batches_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_snapshot, "BATCH_BYTES", 1)


def test_each_tensor_is_let_go_of_as_soon_as_it_is_copied() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    def gathered() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for i, (name, like) in enumerate(LAYOUT):
            whole = torch.full(like.shape, float(i))
            alive.add(whole)
            most = max(most, len(alive))
            yield name, whole
            del whole

    snapshot = WeightSnapshot.take(1, gathered(), layout=LAYOUT, on_host=True)
    assert most <= 3
    values = snapshot.manifest.views(snapshot.flat).values()
    assert [tensor[0].item() for tensor in values] == list(range(8))


@pytest.mark.parametrize(
    "given", [LAYOUT[:-1], [*LAYOUT[1:], LAYOUT[0]], [*LAYOUT, ("more", LAYOUT[0][1])]]
)
def test_tensors_that_are_not_those_of_the_layout_are_refused(
    given: list[tuple[str, Tensor]],
) -> None:
    weights = ((name, torch.ones(like.shape)) for name, like in given)
    with pytest.raises(WeightsRefused, match="layout"):
        WeightSnapshot.take(1, weights, layout=LAYOUT)
