"""Update of a step: its gradients summed over replicas, then applied to the weights.

    backward of the last row:  head ─► blocks, last to first ─► embeddings
                                  │        │
                                  ▼        ▼
    buckets, last to first:    all-reduce, all-reduce, ...        finish(): the rest, and the wait
    for all

- Every member starts the same buckets in the same order, whether it computes a last row or not:
  last to first, except that the last one, which holds the objective's sums, comes at the end.
- Local gradients are copied and never touched. An error during the backward ends the reduction and
  not the backward: finish() raises it, and the gradients are whole for the next epoch.
- apply() reads nothing but the reduced gradients, their norms and sums, the learning rate and the
  state, all of which are equal on every replica. So the new weights are equal bit for bit, too (on
  machines of one kind).
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from paceline.ids import Step, Version
from paceline.mesh.elastic_mesh import EpochCancelled, Handle, MeshError, ProcessMesh
from paceline.process.structured_log import event
from policy_worker.model.train_state import local_tensor
from policy_worker.step.gradients import Gradients
from policy_worker.step.stats import Stats

log = logging.getLogger(__name__)

BUCKET = 1 << 23
"""Elements handed to the mesh at once: 32 MiB of float32."""


@dataclass(eq=False)
class Update:
    """Updates of one rank: start() if the last backward is ahead, reduce(), measured(), apply()."""

    gradients: Gradients
    scratch: Tensor | None = None
    """float32 [gradients.size]: what the mesh reduces, and apply() consumes."""
    norms: dict[str, float] = field(default_factory=dict)
    """Norm of the reduced gradient of each part, over all ranks."""
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of the objective, over all ranks and replicas."""
    _reduction: "Reduction | None" = None

    def start(self, mesh: ProcessMesh) -> "Reduction":
        """The next reduce() finishes it; until then it may begin during the last backward."""
        if self.scratch is None:
            self.scratch = torch.zeros(self.gradients.size, device=self.gradients.device)
        self._reduction = Reduction(mesh, self.gradients, self.scratch)
        return self._reduction

    def cancel(self) -> bool:
        """After start(), if the gradients are void. False if other members have a part of them: the
        mesh has to be left."""
        if self._reduction is not None and self._reduction.started:
            return False
        self._reduction = None
        return True

    def mesh_is_left(self) -> None:
        """Forgets ``scratch`` if what has been started may still write to it."""
        if self._reduction is not None:
            self._reduction = self.scratch = None

    def let_go(self) -> None:
        """Between steps: frees ``scratch``. The next reduce() makes another one."""
        self._reduction = self.scratch = None

    def reduce(self, mesh: ProcessMesh, progress: Callable[[], None]) -> None:
        """Sums the gradients of all members into ``scratch``; local ones are untouched. Raises
        EpochCancelled or MeshError."""
        reduction, self._reduction = self._reduction or self.start(mesh), None
        try:
            reduction.finish(progress)
        except (EpochCancelled, MeshError):
            if not mesh.settled:
                # Something may write to it still, in the middle of the next reduction.
                self.scratch = None
            raise

    def measured(self) -> Stats:
        """Collective over the ranks of the replica, after reduce(): its stats of the step,
        grad_norm of each part (before clipping) included."""
        gradients, replica, reduced = self.gradients, self.gradients.replica, self._reduced()
        self.norms = {
            part: float(replica.all_sum(torch.linalg.vector_norm(reduced[where]).square()).sqrt())
            for part, where in gradients.part_slices.items()
        }
        totals = replica.all_sum(gradients.sums_of(reduced).clone()).tolist()
        self.sums = dict(zip(gradients.objective.summed, totals, strict=True))
        stats = Stats()
        stats.merge(replica.gather(gradients.stats.entries))
        # Stats are finite numbers; a norm that is not shows as 0, and as an update that is skipped.
        for part, norm in self.norms.items():
            name = "grad_norm" if part == gradients.state.main else f"grad_norm_{part}"
            stats.set(name, norm if math.isfinite(norm) else 0.0)
        stats.set("update_skipped", 0.0 if self._finite else 1.0)
        return stats

    def apply(self, version: Version, lr: float) -> None:
        """Changes the state to ``version``, one step further, with the plan's ``lr``; no local
        gradients are left. Each part's gradient is clipped by itself. One that is not finite
        changes no part: all replicas see the same norms, so all of them skip the update."""
        gradients, state, reduced = self.gradients, self.gradients.state, self._reduced()
        if not self._finite:
            event(log, "gradient not finite, update skipped", logging.ERROR, version=version)
        else:
            with torch.no_grad():
                self._clip(reduced)
                for parameter in gradients.parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                grads = [local_tensor(parameter.grad) for parameter in gradients.parameters]
                torch._foreach_copy_(grads, gradients.views(reduced))
                scalars = {name: float(number) for name, number in state.scalars.items()}
                for name in gradients.objective.resting(scalars):
                    for parameter in state.parameters_of(name):
                        parameter.grad = None  # no decay either, and no step of the moments
                for group in state.optimizer.param_groups:
                    group["lr"] = lr * group["lr_scale"]
                state.optimizer.step()
                for name, number in gradients.objective.advance(scalars, self.sums).items():
                    state.scalars[name].fill_(number)
        gradients.clear()
        state.step = Step(state.step + 1)
        state.version = version

    def _clip(self, reduced: Tensor) -> None:
        largest = self.gradients.state.config.train.optimizer.max_grad_norm
        for part, where in self.gradients.part_slices.items():
            if largest is not None and self.norms[part] > largest:
                reduced[where].mul_(largest / (self.norms[part] + 1e-6))

    @property
    def _finite(self) -> bool:
        return all(map(math.isfinite, [*self.norms.values(), *self.sums.values()]))

    def _reduced(self) -> Tensor:
        if self.scratch is None:
            raise RuntimeError("nothing was reduced")
        return self.scratch


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
            leaf.register_post_accumulate_grad_hook(partial(self._completed, index))
            for index, leaf in enumerate(self.gradients.leaves)
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

    def _completed(self, index: int, _leaf: nn.Parameter) -> None:
        """A gradient is whole; on the thread of the backward."""
        parameter = self.gradients.parameters[index]
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
