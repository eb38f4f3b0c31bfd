"""Joiners hand the state on to one another: the source sends it once, and every copy is equal bit
for bit."""

from pathlib import Path

import pytest
import torch

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError
from policy_worker.model.train_state import NO_VERSION, TrainState
from policy_worker.ranks import state_transfer
from policy_worker.ranks.state_transfer import receive_state, send_state, state_tensors
from tests.fixtures.meshes import Members, on_all
from tests.fixtures.train_states import (
    all_bits,
    assert_same_bits,
    synthetic_step,
    tiny_config,
    tiny_state,
)

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("transport")


class Line(Members):
    """A source and joiners: mesh ranks 0, 1, 2, ..."""

    def __init__(self, url: str, key: str, folder: Path, size: int) -> None:
        config = tiny_config(folder)
        self.states = [tiny_state(config) for _ in range(size)]
        synthetic_step(self.states[0])
        self.states[0].version = 7
        super().__init__(url, key, size)
        self.sent = [0] * size
        for rank, mesh in enumerate(self.meshes):
            mesh.send_async = self.counting(rank, mesh.send_async)

    def counting(self, rank: int, send_async):
        def send(buffer, peer):
            self.sent[rank] += buffer.nbytes
            return send_async(buffer, peer)

        return send

    def transfer(self, rank: int) -> None:
        mesh, state = self.meshes[rank], self.states[rank]
        try:
            if rank == 0:
                send_state(mesh, state, 1, lambda: None)
            else:
                following = rank + 1 if rank + 1 < len(self.states) else None
                receive_state(mesh, state, rank - 1, lambda: self.progressed(rank), following)
        except (EpochCancelled, MeshError):
            for over in self.over:  # as the controller ends the epoch for all
                over.set()
            raise

    def progressed(self, rank: int) -> None:
        pass


@pytest.fixture
def line(url: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch):
    monkeypatch.setattr(state_transfer, "BUCKET", 500)
    made = Line(url, request.node.name, tmp_path, 4)
    yield made
    made.close()


def bytes_of(state: TrainState) -> int:
    return sum(t.nbytes for t in state_tensors(state))


def test_every_joiner_has_the_state_and_nobody_sends_it_twice(line: Line) -> None:
    assert on_all(4, line.transfer) == [None] * 4
    wanted = all_bits(line.states[0])
    for state in line.states[1:]:
        assert_same_bits(all_bits(state), wanted)
        assert (state.step, state.version) == (line.states[0].step, 7)
    header = 16
    assert line.sent == [bytes_of(line.states[0]) + header] * 3 + [0]


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_joiner_lost_in_the_middle_leaves_no_state_that_is_half_old(
    line: Line, lost: int, monkeypatch
) -> None:
    def dies(rank: int) -> None:
        if rank == lost:
            line.meshes[rank].abandon()

    monkeypatch.setattr(line, "progressed", dies)
    errors = on_all(4, line.transfer)
    assert errors[lost] is not None
    wanted = all_bits(line.states[0])
    for state, error in zip(line.states[1:], errors[1:], strict=True):
        if error is None:
            assert_same_bits(all_bits(state), wanted)
        else:
            assert state.version == NO_VERSION
    assert line.states[0].version == 7
