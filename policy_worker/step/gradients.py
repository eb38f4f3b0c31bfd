"""Adds up the gradients of one step, group by group, in whatever order and however many rounds.

- What a group contributes depends on the step's totals and on the group alone. So the sum does not
  depend on how groups are dealt to replicas, packed into rows, or split over rounds.
- Local gradients live in ``parameter.grad`` and are only ever added to; the mesh gets a copy.
- A group is added at most once: the plan of the step's next epoch names it again, and it is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.v1 import policy_pb2, rollout_pb2
from policy_worker.objectives.advantages import group_advantages
from policy_worker.objectives.aggregation import Totals, token_weights
from policy_worker.objectives.grpo import TokenColumns, grpo_loss
from policy_worker.ranks.rank_group import RankGroup
from policy_worker.state import TrainState, local_tensor
from policy_worker.step.batch import Ints, TokenBatch, check_vocabulary, decode, staleness
from policy_worker.step.logprobs import score
from policy_worker.step.packing import MicroBatch, pack, plan_rows
from policy_worker.step.stats import Stats, measure

GroupKey = tuple[str, int]
"""Task id and attempt."""


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What all members know of a step. JSON-friendly, for the other ranks of a replica."""

    step: int
    version: int
    tokens: int
    sequences: int
    lines: tuple[tuple[int, int], ...] = ()
    """(first_version, offset), see VersionEpoch."""

    @classmethod
    def of(cls, plan: policy_pb2.StepPlan) -> StepSpec:
        lines = tuple((line.first_version, line.offset) for line in plan.version_epochs)
        return cls(plan.step, plan.version, plan.total_tokens, plan.total_sequences, lines)

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepSpec:
        return cls(**{**value, "lines": tuple(tuple(line) for line in value["lines"])})


@dataclass(frozen=True, slots=True)
class GroupColumns:
    """A Batch with what the loss wants to know of each token ([C]) and sequence ([S])."""

    batch: TokenBatch
    advantage: np.ndarray
    weight: np.ndarray
    staleness: np.ndarray


class Gradients:
    """Local gradients of the open step, and which groups are in them."""

    def __init__(
        self,
        state: TrainState,
        device: torch.device,
        reference: nn.Module | None = None,
        replica: RankGroup | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_progress`` is called after every micro-batch."""
        self._state = state
        self._device = device
        self._reference = reference
        self._replica = replica or RankGroup()
        self._on_progress = on_progress
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]
        self._facts: StepSpec | None = None
        self._added: set[GroupKey] = set()
        self.stats = Stats()

    def begin(self, facts: StepSpec, shard: Iterable[GroupKey]) -> list[GroupKey]:
        """Opens or continues a step; returns which groups of ``shard`` are still to be added.

        Starts over where the step is another one, or where a group was added that is no longer
        this replica's: it would be trained twice.
        """
        wanted = list(shard)
        if facts != self._facts or not self._added.issubset(wanted):
            self.clear()
            self._facts = facts
        return [key for key in wanted if key not in self._added]

    def clear(self) -> None:
        """Drops all local gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        self._added.clear()
        self._facts = None
        self.stats = Stats()

    def add(self, groups: Sequence[rollout_pb2.Group]) -> None:
        """Adds the gradients of ``groups``. Of a sharded replica all ranks call it, with the same.

        Raises BadGroup on a payload that contradicts itself or the model; nothing is added then.
        """
        facts = self._facts
        if facts is None:
            raise RuntimeError("no step is open")
        batch = decode(groups)
        check_vocabulary(batch, groups, self._state.model.get_input_embeddings().num_embeddings)
        columns = self._columns(batch, facts)
        keep = self._contributing(columns)
        rank, ranks = self._replica.rank, self._replica.size
        limit = self._state.config.train.tokens_per_microbatch
        if ranks > 1:
            total = int((columns.batch.length[keep] - 1).sum() + columns.batch.prompt_length.sum())
            limit = max(1, min(limit, -(-total // ranks)))
        rows = plan_rows(columns.batch, keep, limit)
        for start in range(0, len(rows), ranks):
            mine = start + rank < len(rows)
            # The forward of a sharded model is collective: a rank without a row of its own takes
            # part with one that counts nothing.
            row = rows[start + rank] if mine else rows[start]
            self._add_row(columns, pack(columns.batch, row, self._device), counts=mine)
            self._on_progress()
        self._added.update((g.task.task_id, g.task.attempt) for g in groups)
        if rank == 0:
            self.stats.add("loss", 0.0, len(columns.batch.length) / max(facts.sequences, 1))

    @torch.no_grad()
    def flatten(self, scratch: Tensor) -> None:
        """Copies the local gradients into ``scratch``, float32 [size]; zeros where there are none."""
        views = self.views(scratch)
        with_gradient = [i for i, p in enumerate(self._parameters) if p.grad is not None]
        if len(with_gradient) < len(views):
            scratch.zero_()
        if with_gradient:
            torch._foreach_copy_(
                [views[i] for i in with_gradient],
                [local_tensor(self._parameters[i].grad) for i in with_gradient],
            )

    def views(self, scratch: Tensor) -> list[Tensor]:
        """``scratch`` cut into the shapes of the parameters' local parts, in parameter order."""
        locals_ = [local_tensor(p) for p in self._parameters]
        parts = scratch.split([t.numel() for t in locals_])
        return [part.view(t.shape) for part, t in zip(parts, locals_, strict=True)]

    @property
    def size(self) -> int:
        """Elements of this rank's parameters."""
        return sum(local_tensor(p).numel() for p in self._parameters)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def _columns(self, batch: TokenBatch, facts: StepSpec) -> GroupColumns:
        config = self._state.config
        advantage = group_advantages(
            batch.reward, batch.sequences, normalise=config.train.advantage_norm
        )
        lines = [policy_pb2.VersionEpoch(first_version=f, offset=o) for f, o in facts.lines]
        totals = Totals(facts.tokens, facts.sequences)
        return GroupColumns(
            batch,
            advantage.astype(np.float32),
            token_weights(batch.trained, batch.length, totals, config),
            staleness(batch.version, facts.step, lines).astype(np.float32),
        )

    def _contributing(self, columns: GroupColumns) -> Ints:
        """Sequences whose gradient is not zero by construction, ascending."""
        train = self._state.config.train
        batch = columns.batch
        starts = np.cumsum(batch.length) - batch.length
        keep = np.add.reduceat(batch.trained, starts) > 0
        if train.skip_zero_advantage and train.kl_coef == 0:
            keep &= columns.advantage != 0
        return np.flatnonzero(keep)

    def _add_row(self, columns: GroupColumns, micro: MicroBatch, *, counts: bool) -> None:
        config = self._state.config
        with self._precision():
            scores = score(self._state.model, micro, config.rollout.temperature)
        tokens = self._token_columns(columns, micro)
        loss = grpo_loss(scores.logprobs, tokens, config.train)
        if not counts:
            (loss.total * 0.0).backward()
            return
        loss.total.backward()
        measure(self.stats, scores, loss, tokens)
        self.stats.add("loss", float(loss.total.detach()), 0.0)

    def _token_columns(self, columns: GroupColumns, micro: MicroBatch) -> TokenColumns:
        batch, index = columns.batch, micro.token_index
        of_token = micro.sequence_index[micro.sequence_of.cpu().numpy()]
        stacked = np.stack(
            [
                batch.behaviour[index],
                columns.advantage[of_token],
                columns.weight[index],
                batch.trained[index],
                columns.staleness[index],
            ]
        )
        behaviour, advantage, weight, trained, age = torch.from_numpy(stacked).to(self._device)
        reference = None
        if self._reference is not None:
            with torch.no_grad(), self._precision():
                reference = score(
                    self._reference, micro, self._state.config.rollout.temperature
                ).logprobs
        return TokenColumns(
            behaviour,
            advantage,
            weight,
            trained,
            age,
            micro.sequence_of,
            len(micro.sequence_index),
            reference,
        )

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        # Autocast rather than a second copy in bf16: one set of weights to seed, reduce and
        # checkpoint, and gradients arrive in float32. Its price is a cast per row.
        if self._state.config.model.dtype == "bfloat16":
            return torch.autocast(self._device.type, torch.bfloat16)
        return contextlib.nullcontext()
