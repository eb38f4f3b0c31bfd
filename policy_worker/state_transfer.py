"""State transfer: the whole state of a replica, from a healthy member of the mesh to one that joins.

Parameters, saved buffers and optimizer moments of all parts, and the objective's numbers, go tensor by tensor. Their
order and sizes follow from the models alone, which both ends have loaded, so no manifest is needed. In sharded replicas rank i
sends to rank i, which slices the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.ids import Step, Version
from paceline.mesh.elastic_mesh import ProcessMesh
from policy_worker.ranks.sharding import local_weights
from policy_worker.state import NO_VERSION, TrainState, local_tensor

BUCKET = 1 << 23
"""Elements handed to the mesh at once: 32 MiB of float32."""


def state_tensors(state: TrainState) -> Iterator[Tensor]:
    """This rank's part of every tensor of the state."""
    for _, tensor in local_weights(state):
        yield tensor
    for _, parameter in state.named_parameters():
        for _, moment in sorted(state.optimizer.state.get(parameter, {}).items()):
            yield local_tensor(moment)
    yield from state.scalars.values()


def send_state(
    mesh: ProcessMesh, state: TrainState, peers: list[int], progress: Callable[[], None]
) -> None:
    """Sends ``state`` to each of ``peers`` in turn. Raises EpochCancelled or MeshError."""
    header = torch.tensor([state.step, state.version], dtype=torch.int64)
    for peer in peers:
        mesh.send(header, peer)
        for tensor in state_tensors(state):
            for bucket in _buckets(tensor.contiguous()):
                mesh.send(bucket, peer)
                progress()


def receive_state(
    mesh: ProcessMesh, state: TrainState, source: int, progress: Callable[[], None]
) -> None:
    """Fills ``state`` bit for bit, with step and version.

    Raises EpochCancelled or MeshError: the state is a mixture then, and its version NO_VERSION.
    """
    header = torch.zeros(2, dtype=torch.int64)
    state.version = NO_VERSION
    mesh.recv(header, source)
    for tensor in state_tensors(state):
        # Into a buffer of its own: a parameter may be a view that is not contiguous.
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for bucket in _buckets(whole):
            mesh.recv(bucket, source)
            progress()
        with torch.no_grad():
            tensor.copy_(whole)
    step, version = header.tolist()
    state.step, state.version = Step(step), Version(version)


def _buckets(tensor: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.view(-1).split(BUCKET)) if tensor.numel() else ()
