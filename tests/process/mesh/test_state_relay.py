"""Joiners hand the state on to one another: the source sends it once, and every copy is equal bit
for bit."""

import threading
from pathlib import Path

import pytest
import torch

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from policy_worker.model.train_state import NO_VERSION, TrainState
from policy_worker.ranks import state_transfer
from policy_worker.ranks.state_transfer import receive_state, send_state, state_tensors
from tests.fixtures.train_states import (
    all_bits,
    assert_same_bits,
    synthetic_step,
    tiny_config,
    tiny_state,
)

CPU = torch.device("cpu")


class Line:
    """A source and joiners in one process, on real connections: mesh ranks 0, 1, 2, ..."""

    def __init__(self, url: str, key: str, folder: Path, size: int) -> None:
        config = tiny_config(folder)
        self.over = threading.Event()
        self.states = [tiny_state(config) for _ in range(size)]
        synthetic_step(self.states[0])
        self.states[0].version = 7
        self.meshes: list[ProcessMesh | None] = [None] * size
        self.errors: list[Exception | None] = [None] * size
        self.sent = [0] * size
        self.url, self.key = url, key

    def on_all(self, work) -> None:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(self.states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def form(self, rank: int) -> None:
        mesh = ProcessMesh.form(
            url=self.url,
            key=self.key,
            rank=rank,
            size=len(self.states),
            device=CPU,
            cancelled=self.over.is_set,
        )
        send_async = mesh.send_async

        def counting(buffer, peer):
            self.sent[rank] += buffer.nbytes
            return send_async(buffer, peer)

        mesh.send_async = counting
        self.meshes[rank] = mesh

    def transfer(self, rank: int) -> None:
        mesh, state = self.meshes[rank], self.states[rank]
        try:
            if rank == 0:
                send_state(mesh, state, 1, lambda: None)
            else:
                following = rank + 1 if rank + 1 < len(self.states) else None
                receive_state(mesh, state, rank - 1, lambda: self.progressed(rank), following)
        except (EpochCancelled, MeshError) as error:
            self.errors[rank] = error
            self.over.set()  # as the controller ends the epoch for all

    def progressed(self, rank: int) -> None:
        pass


@pytest.fixture
def line(url: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch):
    monkeypatch.setattr(state_transfer, "BUCKET", 500)
    made = Line(url, request.node.name, tmp_path, 4)
    made.on_all(made.form)
    yield made
    for mesh in made.meshes:
        mesh.abandon()


def bytes_of(state: TrainState) -> int:
    return sum(t.nbytes for t in state_tensors(state))


def test_every_joiner_has_the_state_and_nobody_sends_it_twice(line: Line) -> None:
    line.on_all(line.transfer)
    assert line.errors == [None] * 4
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
    line.on_all(line.transfer)
    assert line.errors[lost] is not None
    wanted = all_bits(line.states[0])
    for state, error in zip(line.states[1:], line.errors[1:], strict=True):
        if error is None:
            assert_same_bits(all_bits(state), wanted)
        else:
            assert state.version == NO_VERSION
    assert line.states[0].version == 7
