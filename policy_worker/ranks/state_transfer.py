"""State transfer: the whole state of a replica, from a healthy member of the mesh to all that join.

    source ──► first joiner ──► second joiner ──► ...

Each joiner hands a bucket on while it receives the next one.
So the source sends one copy, however many join, and it takes about as long as one transfer.

Parameters, saved buffers and optimizer moments of all parts, and the objective's numbers, go tensor
by tensor. Their order and sizes follow from the models alone, which both ends have loaded, so no
manifest is needed. In sharded replicas rank i sends to rank i, which slices the same way.
"""

from collections import deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from paceline.ids import Step, Version
from paceline.mesh.elastic_mesh import Handle, ProcessMesh
from policy_worker.model.train_state import NO_VERSION, TrainState, local_tensor
from policy_worker.ranks.sharding import local_weights
from policy_worker.step.update import BUCKET

RELAYED = 2
"""Buckets that a joiner holds for the next one, at most."""


def state_tensors(state: TrainState) -> Iterator[Tensor]:
    """This rank's part of every tensor of the state."""
    for _, tensor in local_weights(state):
        yield tensor
    for _, parameter in state.named_parameters():
        for _, moment in sorted(state.optimizer.state.get(parameter, {}).items()):
            yield local_tensor(moment)
    yield from state.scalars.values()


def send_state(
    mesh: ProcessMesh, state: TrainState, peer: int, progress: Callable[[], None]
) -> None:
    """Sends ``state`` to ``peer``, the first joiner. Raises EpochCancelled or MeshError."""
    mesh.send(torch.tensor([state.step, state.version], dtype=torch.int64), peer)
    for tensor in state_tensors(state):
        for bucket in _buckets(tensor.contiguous()):
            mesh.send(bucket, peer)
            progress()


def receive_state(
    mesh: ProcessMesh,
    state: TrainState,
    source: int,
    progress: Callable[[], None],
    following: int | None = None,
) -> None:
    """Fills ``state`` bit for bit, with step and version, from ``source``, and hands it on to
    ``following``. Raises EpochCancelled or MeshError, also if it could not be handed on: the state
    is void then, its version NO_VERSION."""
    header = torch.zeros(2, dtype=torch.int64)
    state.version = NO_VERSION
    sent: deque[tuple[Handle, Tensor]] = deque()

    def hand_on(bucket: Tensor) -> None:
        if following is not None:
            sent.append((mesh.send_async(bucket, following), bucket))
            if len(sent) > RELAYED:
                mesh.wait(sent.popleft()[0])

    mesh.recv(header, source)
    hand_on(header)
    for tensor in state_tensors(state):
        # Into a buffer of its own: a parameter may be a view that is not contiguous.
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        for bucket in _buckets(whole):
            mesh.recv(bucket, source)
            hand_on(bucket)
            progress()
        with torch.no_grad():
            tensor.copy_(whole)
    for handle, _ in sent:
        mesh.wait(handle)
        progress()
    step, version = header.tolist()
    state.step, state.version = Step(step), Version(version)


def _buckets(tensor: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.view(-1).split(BUCKET)) if tensor.numel() else ()
