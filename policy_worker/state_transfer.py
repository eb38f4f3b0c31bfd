"""The whole state of a replica, from a healthy member of the mesh to one that joins.

Parameters, saved buffers and optimizer moments, tensor by tensor in an order that only the model
decides, so that both ends agree without a manifest; sizes are fixed by the model both have loaded.
With sharded replicas rank i sends to rank i, which slices the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import ProcessMesh
from policy_worker.ranks.sharding import local_weights
from policy_worker.state import TrainState, local_tensor

BUCKET = 1 << 23
"""Elements handed to the mesh at once: 32 MiB of float32."""


def state_tensors(state: TrainState) -> Iterator[Tensor]:
    """This rank's part of every tensor of the state."""
    for _, tensor in local_weights(state):
        yield tensor
    for parameter in state.model.parameters():
        for _, moment in sorted(state.optimizer.state.get(parameter, {}).items()):
            yield local_tensor(moment)


def send_state(
    mesh: ProcessMesh, state: TrainState, peers: list[int], progress: Callable[[], None]
) -> None:
    """To each of ``peers`` in turn. Raises EpochCancelled or MeshError."""
    header = torch.tensor([state.step, state.version], dtype=torch.int64)
    for peer in peers:
        mesh.send(header, peer)
        for tensor in state_tensors(state):
            for bucket in _buckets(tensor.contiguous()):
                mesh.send(bucket, peer)
                progress()


@torch.no_grad()
def receive_state(
    mesh: ProcessMesh, state: TrainState, source: int, progress: Callable[[], None]
) -> None:
    """Into ``state``, bit for bit, with step and version. Raises EpochCancelled or MeshError: the
    state is a mixture then, and its version -1."""
    header = torch.zeros(2, dtype=torch.int64)
    state.version = -1
    mesh.recv(header, source)
    for tensor in state_tensors(state):
        # Into a buffer of its own: a parameter may be a view that is not contiguous.
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for bucket in _buckets(whole):
            mesh.recv(bucket, source)
            progress()
        tensor.copy_(whole)
    state.step, state.version = (int(x) for x in header.tolist())


def _buckets(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(-1).split(BUCKET) if tensor.numel() else ()
