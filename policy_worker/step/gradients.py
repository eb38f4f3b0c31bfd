"""Local gradients of one step: the sum over groups, in any order and over any number of calls.

- The contribution of a group depends on the step's totals and on the group alone. So the sum does not
  depend on how groups are assigned to replicas, packed into rows, or split over calls.
- Local gradients live in ``parameter.grad`` and are only ever added to; the mesh gets a copy.
- A group is added at most once: the plan of the step's next epoch names it again, and it is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.ids import Step, Version
from paceline.mesh.elastic_mesh import EpochCancelled
from paceline.v1 import policy_pb2, rollout_pb2
from policy_worker.objectives.columns import (
    TokenColumns,
    group_advantages,
    token_weights,
    trained_by_sequence,
)
from policy_worker.objectives.grpo import grpo_loss
from policy_worker.ranks.rank_group import RankGroup
from policy_worker.state import TrainState, local_tensor
from policy_worker.step.batch import (
    GroupKey,
    Ints,
    TokenBatch,
    check_vocabulary,
    decode,
    staleness,
)
from policy_worker.step.logprobs import score
from policy_worker.step.packing import MicroBatch, attended_tokens, pack, plan_rows
from policy_worker.step.stats import Stats, measure


class RowOutOfMemory(Exception):
    """A row of these groups does not fit into the device's memory; no gradient of the step is left."""

    def __init__(self, message: str, groups: tuple[GroupKey, ...]) -> None:
        super().__init__(message)
        self.groups = groups

    @property
    def names(self) -> str:
        return ", ".join(task_id for task_id, _ in self.groups[:8])


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The totals that all members of a step share."""

    step: Step
    version: Version
    """Of the state before the step."""
    tokens: int
    sequences: int
    """With a token that is trained."""
    version_epochs: tuple[tuple[int, int], ...] = ()
    """(first_version, offset) of each VersionEpoch of the plan."""
    oldest_step: Step = Step(0)
    """Tokens of states before it are masked; ``tokens`` does not count them."""

    @property
    def token_age(self) -> int:
        """Age of the oldest tokens that are not masked."""
        return self.step - 1 - self.oldest_step

    @classmethod
    def of(cls, plan: policy_pb2.StepPlan) -> StepTotals:
        epochs = tuple((epoch.first_version, epoch.offset) for epoch in plan.version_epochs)
        step, version = Step(plan.step), Version(plan.version)
        totals = plan.total_tokens, plan.total_sequences
        return cls(step, version, *totals, epochs, Step(plan.oldest_step))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepTotals:
        """From asdict() that has gone through JSON."""
        epochs = tuple(tuple(epoch) for epoch in value["version_epochs"])
        return cls(**{**value, "version_epochs": epochs})


@dataclass(eq=False)
class Gradients:
    """Local gradients of the open step, and the groups that are in them."""

    state: TrainState
    device: torch.device
    reference: nn.Module | None = None
    replica: RankGroup = field(default_factory=RankGroup)
    on_progress: Callable[[], None] = lambda: None
    """Called after every micro-batch."""
    left: Callable[[], bool] = lambda: False
    """Whether the step was given up meanwhile; asked after every micro-batch on the rank that leads."""

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.state.model.parameters() if p.requires_grad]
        self.size = sum(local_tensor(p).numel() for p in self.parameters)
        """Elements of this rank's parameters."""
        self._spec: StepTotals | None = None
        self._added: set[GroupKey] = set()
        self.stats = Stats()

    def begin(self, spec: StepTotals, shard: Iterable[GroupKey]) -> list[GroupKey]:
        """Opens or continues a step; returns the groups of ``shard`` are still to be added.

        Starts over if the step is another one, or if a group was added that is no longer this
        replica's and would be trained twice.
        """
        wanted = list(shard)
        if spec != self._spec or not self._added.issubset(wanted):
            self.clear()
            self._spec = spec
        return [key for key in wanted if key not in self._added]

    def clear(self) -> None:
        """Drops all local gradients."""
        for parameter in self.parameters:
            parameter.grad = None
        self._added.clear()
        self._spec = None
        self.stats = Stats()

    def add(self, groups: Sequence[rollout_pb2.Group]) -> None:
        """Adds the gradients of ``groups``. Of a sharded replica all ranks call it, with the same.

        Raises BadGroup on a payload that contradicts itself or the model; nothing is added then.
        Raises RowOutOfMemory (ReplicaBroken with several ranks) if a row does not fit into memory, and EpochCancelled on every rank if the
        step was given up; all local gradients are dropped, and the step has to begin again.
        """
        spec = self._spec
        if spec is None:
            raise RuntimeError("no step is open")
        batch = decode(groups)
        check_vocabulary(batch, groups, self.state.model.get_input_embeddings().num_embeddings)
        columns = self._columns(batch, spec)
        keep = self._contributing(batch, columns)
        rank, ranks = self.replica.rank, self.replica.size
        limit = self.state.config.train.tokens_per_microbatch
        if ranks > 1:
            total = int(attended_tokens(batch, keep).sum())
            limit = max(1, min(limit, -(-total // ranks)))
        rows = plan_rows(batch, keep, limit)
        for start in range(0, len(rows), ranks):
            mine = start + rank < len(rows)
            # The forward of a sharded model is collective: a rank without a row of its own takes
            # part with one that counts nothing.
            row = rows[start + rank] if mine else rows[start]
            try:
                self._add_row(columns, pack(batch, row, self.device), counts=mine)
            except torch.OutOfMemoryError as error:
                refused = self._too_large(batch, row, groups, error)
                if ranks > 1:
                    # The other ranks wait in a collective of their rows: the replica has to die as one. Its
                    # groups become suspects, and are computed one by one from then on.
                    raise self.replica.given_up(f"groups {refused.names}: {refused}") from error
                raise refused from error
            self.on_progress()
            # One integer over loopback for each micro-batch: ranks look at different moments.
            if not self.replica.agree(not self.left()):
                self.clear()
                raise EpochCancelled(f"step {spec.step} was given up")
        self._added.update((g.task.task_id, g.task.attempt) for g in groups)
        if rank == 0:
            trained = np.count_nonzero(trained_by_sequence(columns.trained, batch.length))
            self.stats.add("loss", 0.0, trained / max(spec.sequences, 1))

    def _too_large(
        self, batch: TokenBatch, row: Ints, groups: Sequence[rollout_pb2.Group], error: Exception
    ) -> RowOutOfMemory:
        self.clear()  # a part of the row may be in the gradients
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        named = [groups[g].task for g in np.unique(batch.group_of[row])]
        tokens = int(batch.prompt_length[batch.group_of[row]].sum() + batch.length[row].sum())
        return RowOutOfMemory(
            f"a row of {len(row)} sequences with {tokens} tokens, prompts included: "
            + str(error).partition("\n")[0],
            tuple((task.task_id, task.attempt) for task in named),
        )

    def flatten(self, scratch: Tensor) -> None:
        """Copies the local gradients into ``scratch``, float32 [size]; zeros if there are none."""
        views = self.views(scratch)
        with_gradient = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if len(with_gradient) < len(views):
            scratch.zero_()
        if with_gradient:
            torch._foreach_copy_(
                [views[i] for i in with_gradient],
                [local_tensor(self.parameters[i].grad) for i in with_gradient],
            )

    def views(self, scratch: Tensor) -> list[Tensor]:
        """``scratch`` cut into the shapes of the parameters' local parts, in parameter order."""
        locals_ = [local_tensor(p) for p in self.parameters]
        parts = scratch.split([t.numel() for t in locals_])
        return [part.view(t.shape) for part, t in zip(parts, locals_, strict=True)]

    def _columns(self, batch: TokenBatch, spec: StepTotals) -> TokenColumns[np.ndarray]:
        train = self.state.config.train
        advantage = group_advantages(batch.reward, batch.sequences, normalise=train.advantage_norm)
        age = staleness(batch.version, spec.step, spec.version_epochs)
        trained = batch.trained * (age <= spec.token_age).astype(np.float32)
        return TokenColumns(
            behaviour=batch.behaviour,
            advantage=np.repeat(advantage.astype(np.float32), batch.length),
            weight=token_weights(
                trained, batch.length, spec.tokens, spec.sequences, self.state.config
            ),
            trained=trained,
            staleness=age.astype(np.float32),
            sequence_of=np.repeat(np.arange(len(batch.length)), batch.length),
            sequences=len(batch.length),
        )

    def _contributing(self, batch: TokenBatch, columns: TokenColumns[np.ndarray]) -> Ints:
        """Sequences whose gradient is not zero by construction, ascending."""
        train = self.state.config.train
        starts = np.cumsum(batch.length) - batch.length
        keep = np.add.reduceat(columns.trained, starts) > 0
        if train.skip_zero_advantage and train.kl_coef == 0:
            keep &= columns.advantage[starts] != 0
        return np.flatnonzero(keep)

    def _add_row(
        self, columns: TokenColumns[np.ndarray], micro: MicroBatch, *, counts: bool
    ) -> None:
        config = self.state.config
        with self._precision():
            scores = score(self.state.model, micro, config.rollout.temperature)
        tokens = columns.of(micro, self.device, self._reference_logprobs(micro))
        loss = grpo_loss(scores.logprobs, tokens, config.train)
        if not counts:
            (loss.total * 0.0).backward()
            return
        loss.total.backward()
        measure(self.stats, scores, loss, tokens)
        self.stats.add("loss", float(loss.total.detach()), 0.0)

    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad(), self._precision():
            return score(self.reference, micro, self.state.config.rollout.temperature).logprobs

    def _precision(self) -> AbstractContextManager[object]:
        """Context manager around a forward."""
        # Autocast rather than a second copy in bf16: one set of weights to transfer, reduce and
        # checkpoint, and gradients arrive in float32. Its price is a cast per row.
        if self.state.config.model.dtype != "bfloat16":
            return nullcontext()
        mixed: AbstractContextManager[object] = torch.autocast(self.device.type, torch.bfloat16)
        return mixed
