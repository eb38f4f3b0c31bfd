"""Reduction of a step's gradients over replicas, bucket by bucket, while the backward of the step's
last row goes on.

    backward of the last row:  head ─► blocks, last to first ─► embeddings
                                  │        │
                                  ▼        ▼
    buckets, last to first:    all-reduce, all-reduce, ...        finish(): the rest, and the wait
    for all

- Every member starts the same buckets in the same order, whether it computes a last row or not:
  last to first, except that the last one, which holds the objective's sums, comes at the end.
- Local gradients are copied and never touched. An error during the backward ends the reduction and
  not the backward: finish() raises it, and the gradients are whole for the next epoch.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from paceline.mesh.elastic_mesh import EpochCancelled, Handle, MeshError, ProcessMesh
from policy_worker.model.train_state import local_tensor
from policy_worker.step.gradients import Gradients

BUCKET = 1 << 23
"""Elements handed to the mesh at once: 32 MiB of float32."""


@dataclass(eq=False)
class Reduction:
    """One attempt to sum ``gradients`` over a mesh into ``scratch``, float32 [gradients.size]."""

    mesh: ProcessMesh
    gradients: Gradients
    scratch: Tensor
    ready: set[int] = field(default_factory=set)
    _running: list[Handle] = field(default_factory=list)
    _failure: EpochCancelled | MeshError | None = None

    def __post_init__(self) -> None:
        self._views = self.gradients.views(self.scratch)
        self._buckets = self.scratch.split(BUCKET)
        self._order = [*range(len(self._buckets) - 2, -1, -1), len(self._buckets) - 1]
        self._of_parameter: list[range] = []
        self._missing = [0] * len(self._buckets)
        end = 0
        for view in self._views:
            start, end = end, end + view.numel()
            buckets = range(start // BUCKET, -(-end // BUCKET) if end > start else start // BUCKET)
            self._of_parameter.append(buckets)
            for bucket in buckets:
                self._missing[bucket] += 1

    @property
    def started(self) -> int:
        """Buckets whose sum has been started."""
        return len(self._running)

    @contextlib.contextmanager
    def during_backward(self) -> Iterator[None]:
        """The backward inside is the last one of the step: what it completes is reduced at once."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._completed, index))
            for index, parameter in enumerate(self.gradients.parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self, progress: Callable[[], None]) -> None:
        """Waits for all. Raises EpochCancelled or MeshError: ``scratch`` holds garbage then."""
        if self._failure is not None:
            raise self._failure
        self.gradients.flatten(self.scratch, self.ready)
        while self.started < len(self._order):
            self._start_next()
        for handle in self._running:
            self.mesh.wait(handle)
            progress()

    def _completed(self, index: int, parameter: nn.Parameter) -> None:
        """A gradient is whole; on the thread of the backward."""
        if self._failure is not None or index in self.ready or parameter.grad is None:
            return
        self._views[index].copy_(local_tensor(parameter.grad))
        self.ready.add(index)
        for bucket in self._of_parameter[index]:
            self._missing[bucket] -= 1
        try:
            while (
                self.started < len(self._order) - 1 and not self._missing[self._order[self.started]]
            ):
                self._start_next()
        except (EpochCancelled, MeshError) as error:
            self._failure = error

    def _start_next(self) -> None:
        bucket = self._buckets[self._order[self.started]]
        self._running.append(self.mesh.all_reduce_async(bucket))
