"""Held-out measurements: loss of recorded groups, and more, without gradients."""

from collections.abc import Sequence

import numpy as np
import torch

from paceline.ids import Step
from paceline.v1 import rollout_pb2
from policy_worker.objectives.batch import BadGroup, Ints, StepTotals
from policy_worker.objectives.columns import trained_by_sequence
from policy_worker.rows.group_reading import decode
from policy_worker.rows.row_shards import RowShard
from policy_worker.step.gradients import Gradients
from policy_worker.step.stats import Stats, measure


def measure_held_out(gradients: Gradients, groups: Sequence[rollout_pb2.Group]) -> Stats:
    """This rank's part of the sums over ``groups``, as if they were one step: "loss" is its loss.
    Local gradients are untouched. Of a sharded replica all ranks call it, with the same groups.
    Raises BadGroup that names the groups, also if one does not fit into memory by itself
    (ReplicaBroken with several ranks)."""
    state, device = gradients.state, gradients.device
    batch = decode(groups)
    per_sequence = trained_by_sequence(batch.trained, batch.length)
    tokens, sequences = int(per_sequence.sum()), int(np.count_nonzero(per_sequence))
    totals = StepTotals(Step(state.step + 1), state.version, tokens, sequences)
    share = gradients.share_of(groups, totals)
    rows = [(row, True) for row in share.rows]
    # The forward is collective: one without a row of its own counts nothing.
    rows += [(share.filler, False)] * (share.rounds - len(rows))
    stats = Stats()
    while rows:
        row, mine = rows.pop(0)
        try:
            micro = gradients.forwards.pack(share.batch, row, device)
            with torch.no_grad():
                scores, reference = gradients.forwards.scores(micro)
                columns = share.columns.of(micro, device, reference)
                loss = gradients.objective.loss(scores, columns)
        except torch.OutOfMemoryError as error:
            rows[:0] = [(row, True) for row in _one_row_a_group(gradients, share, row, error)]
            continue
        if mine:
            measure(stats, scores, loss, columns, sampled=not state.config.recorded)
        gradients.on_progress()
    if gradients.replica.leads:
        stats.add("loss", 0.0, 1.0)
    return stats


def _one_row_a_group(
    gradients: Gradients, share: RowShard, row: Ints, error: torch.OutOfMemoryError
) -> list[Ints]:
    """The groups of ``row``, which does not fit into memory, in rows of their own. Raises BadGroup
    if it is one already, and ReplicaBroken if other ranks wait for this one."""
    if gradients.device.type == "cuda":
        torch.cuda.empty_cache()
    named, why = share.in_words(row, error)
    if gradients.replica.size > 1:
        raise gradients.replica.given_up(f"held-out groups: {why}") from error
    if len(named) == 1:
        raise BadGroup(why, named, "out_of_memory") from error
    group_of = share.batch.group_of[row]
    return [row[group_of == g] for g in np.unique(group_of)]
