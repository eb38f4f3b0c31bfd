"""Held-out measurements: the loss of recorded groups, and what the objective measures, without
gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from paceline.ids import Step
from paceline.process.structured_log import first_line
from paceline.v1 import rollout_pb2
from policy_worker.objectives.batch import (
    BadGroup,
    Ints,
    StepTotals,
    TokenBatch,
    check_values,
    decode,
    key_of,
)
from policy_worker.objectives.columns import trained_by_sequence
from policy_worker.rows.packing import plan_rows
from policy_worker.step.gradients import Gradients
from policy_worker.step.stats import Stats, measure


def measure_held_out(gradients: Gradients, groups: Sequence[rollout_pb2.Group]) -> Stats:
    """This rank's part of the sums over ``groups``, as if they were one step: "loss" is its loss.
    Local gradients are untouched. Of a sharded replica all ranks call it, with the same groups.
    Raises BadGroup that names the groups, also if one does not fit into memory by itself
    (ReplicaBroken with several ranks)."""
    batch = decode(groups)
    check_values(batch, groups, gradients.vocabulary)
    state, replica = gradients.state, gradients.replica
    per_sequence = trained_by_sequence(batch.trained, batch.length)
    totals = StepTotals(
        Step(state.step + 1),
        state.version,
        int(per_sequence.sum()),
        int(np.count_nonzero(per_sequence)),
    )
    columns = gradients.objective.columns(batch, totals)
    every = np.arange(len(batch.length))
    limit, whole = state.config.train.memory.tokens_per_microbatch, gradients.objective.whole_groups
    rows = plan_rows(batch, every, limit, whole_groups=whole)
    stats = Stats()
    start = 0
    while start < len(rows):
        # As in Gradients.add: the forward is collective, and one without a row of its own counts
        # nothing.
        mine = start + replica.rank < len(rows)
        row = rows[start + replica.rank] if mine else rows[start]
        try:
            micro = gradients.forwards.pack(batch, row, gradients.device)
            with torch.no_grad():
                scores, reference = gradients.forwards.scores(micro)
                tokens = columns.of(micro, gradients.device, reference)
                loss = gradients.objective.loss(scores, tokens)
        except torch.OutOfMemoryError as error:
            rows[start : start + 1] = _one_row_a_group(gradients, batch, row, groups, error)
            continue
        if mine:
            measure(stats, scores, loss, tokens, sampled=not state.config.recorded)
            stats.add("loss", float(loss.total), 0.0)
        gradients.on_progress()
        start += replica.size
    if replica.rank == 0:
        stats.add("loss", 0.0, 1.0)
    return stats


def _one_row_a_group(
    gradients: Gradients,
    batch: TokenBatch,
    row: Ints,
    groups: Sequence[rollout_pb2.Group],
    error: torch.OutOfMemoryError,
) -> list[Ints]:
    """The groups of ``row``, which does not fit into memory, in rows of their own. Raises BadGroup
    if it is one already, and ReplicaBroken if other ranks wait for this one."""
    if gradients.device.type == "cuda":
        torch.cuda.empty_cache()
    group_of = batch.group_of[row]
    numbers = np.unique(group_of)
    named = [key_of(groups[g]) for g in numbers]
    tokens = int(batch.prompt_length[numbers].sum() + batch.length[row].sum())
    said = f"{tokens} tokens, prompts included: {first_line(error)}"
    if gradients.replica.size > 1:
        raise gradients.replica.given_up(f"held-out rows: {said}") from error
    if len(numbers) == 1:
        raise BadGroup(said, named, "out_of_memory") from error
    return [row[group_of == g] for g in numbers]
