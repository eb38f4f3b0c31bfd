"""Packing: micro-batches without padding, as rows of prompts and completions.

A row is [prompt, completion 1, completion 2, ...] for one group after the other. The prompt appears
once and all completions of the group attend to it, so its forward is shared. So is what a sequence
shares with an earlier one of its sample (``row_layout.Forest``). A group that is larger than a row
has several, and each begins with what its sequences share. The last token of a completion is
an input only if a scalar head reads it or another sequence goes on from it: nothing is predicted
from it.

    row        p p p p a a a b b | p p p c c c c
    position   0 1 2 3 4 5 6 4 5 | 0 1 2 3 4 5 6
    predicts   . . . * a a a b b     (the last prompt token predicts the first of a and of b)
"""

import logging
import os

import numpy as np
import torch

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.memory_plan import GIB, SHARES_GPU, Gpu, settled, with_rows
from paceline.model_shape import read_shape
from paceline.payloads.routes import UNKNOWN
from paceline.process.compute_device import to_device
from paceline.process.structured_log import event, first_line
from policy_worker.model.attention import MicroBatch
from policy_worker.model.row_layout import Forest, Packing, ranges
from policy_worker.objectives.batch import GroupLengths, Ints, TokenBatch
from policy_worker.rows.replica import Replica

log = logging.getLogger(__name__)


def settle_rows(config: Config, replica: Replica, device: torch.device) -> Config:
    """``config`` with the size of rows and recomputation settled by the memory plan, if they are
    "auto" and ``device`` is a GPU; on one that others of the fleet compute on, by their defaults.
    Collective: the ranks of a replica settle for what each of them has room for."""
    automatic = "auto" in (
        config.model.gradient_checkpointing,
        config.train.memory.tokens_per_microbatch,
    )
    if device.type != "cuda" or not automatic:
        return config
    # What others hold is not there for this worker, but for the one that it takes turns with.
    free, total = torch.cuda.mem_get_info(device)
    gpu = Gpu(torch.cuda.get_device_name(device), total if config.takes_turns else free)
    shared = SHARES_GPU in os.environ and not config.takes_turns
    mine = config
    if not shared:
        try:
            mine = settled(config, read_shape(config), gpu)
        except BadInput as error:  # a model that loads may have no plan
            event(log, "no plan of rows", logging.WARNING, why=first_line(error))
    wanted = mine.train.memory.row_tokens, mine.model.recomputes
    rows, again = zip(*replica.gather(wanted), strict=True)
    if replica.leads:
        event(
            log,
            "rows settled",
            tokens=min(rows),
            recomputation=any(again),
            gpu=gpu.name,
            gib=gpu.bytes / GIB,
            shared=shared,
        )
    return with_rows(config, min(rows), any(again))


def plan_rows(
    batch: GroupLengths, keep: Ints, tokens_per_microbatch: int, *, whole_groups: bool = False
) -> list[Ints]:
    """Splits the sequences ``keep`` (indices, ascending) into rows of at most so many attended
    tokens.

    A prefix is in the row once and counts once for each of its sequences: attention gathers, and
    the backward pass keeps, queries, keys, values and outputs of every token for every sequence
    that attends to it. So the number bounds the memory of a row. Groups stay together if they fit,
    longest first, so that rows hold sequences of similar length. A group that does not fit is
    split, and its prompt repeated. A single sequence that is longer than the limit gets a row of
    its own, and so does a whole group with ``whole_groups``, which splits none. The same input
    gives the same rows.
    """
    if len(keep) == 0:
        return []
    group = batch.group_of[keep]
    attended = attended_tokens(batch, keep)
    starts = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    ends = np.r_[starts[1:], len(keep)]
    totals = np.add.reduceat(attended, starts)
    longest = np.maximum.reduceat(attended, starts)
    rows: list[Ints] = []
    row: list[Ints] = []
    used = 0
    for i in np.argsort(-longest, kind="stable"):
        if used + totals[i] <= tokens_per_microbatch:
            row.append(keep[starts[i] : ends[i]])
            used += int(totals[i])
            continue
        if row:
            rows.append(np.concatenate(row))
        row, used = [], 0
        part, size = starts[i], 0
        for s in range(starts[i], ends[i]):
            if size + attended[s] > tokens_per_microbatch and s > part and not whole_groups:
                rows.append(keep[part:s])
                part, size = s, 0
            size += int(attended[s])
        row, used = [keep[part : ends[i]]], size
    if row:
        rows.append(np.concatenate(row))
    return rows


def attended_tokens(batch: GroupLengths, sequences: Ints) -> Ints:
    """Input tokens of each of ``sequences``, with its prefix."""
    tokens: Ints = batch.length[sequences] - 1 + batch.prefix[sequences]
    return tokens


def forest_of(
    batch: TokenBatch, sequences: Ints, *, last_tokens: bool = False
) -> tuple[Ints, Forest]:
    """The runs of the row of ``sequences``, rising, as ``TokenBatch.parent`` names them, and how
    they lie. What a sequence goes on from is in the row, whether it is asked for or not."""
    groups = len(batch.sequences)
    parents = np.concatenate([np.full(groups, -1), batch.parent])
    prefix = np.concatenate([np.zeros(groups, np.int64), batch.prefix])
    found = [groups + sequences]
    while (above := parents[found[-1]]).max() >= 0:
        found.append(np.unique(above[above >= 0]))
    runs = np.unique(np.concatenate(found))
    inputs = np.zeros(len(runs), np.int64)
    asked = np.searchsorted(runs, groups + sequences)
    inputs[asked] = batch.length[sequences] - (not last_tokens)
    parent = np.where(parents[runs] >= 0, np.searchsorted(runs, parents[runs]), -1)
    # Groups lie in the order of ``sequences``, which begins with those of long sequences.
    group_of = batch.group_of
    group = np.where(runs < groups, runs, group_of[runs - groups])
    place = np.empty(groups, np.int64)
    place[group_of[sequences][::-1]] = np.arange(len(sequences))[::-1]
    order = place[group]
    return runs, Forest.planted(parent, prefix[runs], inputs, order)


def pack(
    batch: TokenBatch, sequences: Ints, device: torch.device, *, last_tokens: bool = False
) -> MicroBatch:
    """The row of ``sequences`` (indices into ``batch``; those of one group stand side by side).
    ``last_tokens``: the last token of each sequence is in the row, too."""
    runs, forest = forest_of(batch, sequences, last_tokens=last_tokens)
    groups, length = len(batch.sequences), batch.length[sequences]
    own = np.searchsorted(runs, groups + sequences)
    prompt_offset = np.cumsum(batch.prompt_length) - batch.prompt_length
    token_offset = np.cumsum(batch.length) - batch.length
    prompts = int(np.searchsorted(runs, groups))
    # Places in the row of all prompts' tokens, and of all sequences'; and where they come from.
    parts = slice(prompts), slice(prompts, None)
    offsets = prompt_offset[runs[:prompts]], token_offset[runs[prompts:] - groups]
    places = [ranges(forest.start[part], forest.tokens[part]) for part in parts]
    sources = [ranges(o, forest.tokens[part])[0] for o, part in zip(offsets, parts, strict=True)]
    total = forest.total
    ids, positions = np.empty((2, total), np.int64)
    for (place, within), source, part, tokens in zip(
        places, sources, parts, (batch.prompt_tokens, batch.tokens), strict=True
    ):
        ids[place] = tokens[source]
        positions[place] = within + np.repeat(forest.prefix[part], forest.tokens[part])
    # Targets: token j of a sequence is predicted from its token j - 1, the first from what it goes
    # on from. If that is nothing, the token is not trained, and any place will do.
    token_index, within = ranges(token_offset[sequences], length)
    sequence_of = np.repeat(np.arange(len(length)), length)
    row_start, prefix = forest.start[own], forest.prefix[own]
    before = forest.places(own, np.maximum(prefix - 1, 0)).clip(max=total - 1)
    columns = {
        "ids": ids,
        "position": positions,
        "predict_from": np.where(
            within == 0, before[sequence_of], row_start[sequence_of] + within - 1
        ),
        "targets": batch.tokens[token_index],
        "sequence_of": sequence_of,
        "token_at": row_start[sequence_of] + within,
    }
    if batch.routes is not None and batch.prompt_routes is not None:
        routes = np.empty((total, batch.routes.shape[1]), np.int64)
        for (place, _), source, of_tokens in zip(
            places, sources, (batch.prompt_routes, batch.routes), strict=True
        ):
            routes[place] = of_tokens[source]
        columns["routes"] = np.where(routes == UNKNOWN, -1, routes)
    row = dict(zip(columns, to_device([*columns.values()], device), strict=True))
    return MicroBatch(
        input_ids=row["ids"][None],
        position_ids=row["position"][None],
        packing=Packing(forest, own, row["position"], row.get("routes")),
        predict_from=row["predict_from"],
        targets=row["targets"],
        token_index=token_index,
        sequence_index=sequences,
        sequence_of=row["sequence_of"],
        token_at=row["token_at"] if last_tokens else None,
    )
