"""Packing: micro-batches without padding, as rows of prompts and completions.

A row is [prompt, completion 1, completion 2, ...] for one group after the other. The prompt appears
once and all completions of the group attend to it, so its forward is shared. The last token of a
completion is an input only if a scalar head reads it: nothing is predicted from it.

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
from policy_worker.model.row_layout import Packing, ranges
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

    A prompt is in the row once and counts once for each of its sequences: attention gathers, and
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
    """Input tokens of each of ``sequences``, with its prompt."""
    tokens: Ints = batch.length[sequences] - 1 + batch.prompt_length[batch.group_of[sequences]]
    return tokens


def pack(
    batch: TokenBatch, sequences: Ints, device: torch.device, *, last_tokens: bool = False
) -> MicroBatch:
    """The row of ``sequences`` (indices into ``batch``; those of one group stand side by side).
    ``last_tokens``: the last token of each sequence is in the row, too."""
    group = batch.group_of[sequences]
    length = batch.length[sequences]
    inputs = length if last_tokens else length - 1
    prompt = batch.prompt_length[group]
    first = np.r_[True, group[1:] != group[:-1]]  # the sequence that its group's prompt precedes
    row_start = np.cumsum(inputs + np.where(first, prompt, 0)) - inputs
    head = np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))
    prompt_start = (row_start - prompt)[head]
    total = int(row_start[-1] + inputs[-1])
    ids = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    prompt_offset = np.cumsum(batch.prompt_length) - batch.prompt_length
    token_offset = (np.cumsum(batch.length) - batch.length)[sequences]
    heads = np.flatnonzero(first)
    place, within = ranges(prompt_start[heads], prompt[heads])
    ids[place] = batch.prompt_tokens[ranges(prompt_offset[group[heads]], prompt[heads])[0]]
    positions[place] = within
    place, within = ranges(row_start, inputs)
    ids[place] = batch.tokens[ranges(token_offset, inputs)[0]]
    positions[place] = within + np.repeat(prompt, inputs)
    # Targets: token j of a completion is predicted from its token j - 1, the first from the prompt.
    token_index, within = ranges(token_offset, length)
    sequence_of = np.repeat(np.arange(len(first)), length)
    predict_from = np.where(
        within == 0, (prompt_start + prompt - 1)[sequence_of], row_start[sequence_of] + within - 1
    )
    columns = {
        "ids": ids,
        "position": positions,
        "predict_from": predict_from,
        "targets": batch.tokens[token_index],
        "sequence_of": sequence_of,
        "token_at": row_start[sequence_of] + within,
    }
    if batch.routes is not None and batch.prompt_routes is not None:
        routes = np.full((total, batch.routes.shape[1]), UNKNOWN, np.uint16)
        place, within = ranges(prompt_start[heads], prompt[heads])
        routes[place] = batch.prompt_routes[ranges(prompt_offset[group[heads]], prompt[heads])[0]]
        routes[ranges(row_start, inputs)[0]] = batch.routes[ranges(token_offset, inputs)[0]]
        columns["routes"] = np.where(routes == UNKNOWN, -1, routes.astype(np.int64))
    row = dict(zip(columns, to_device([*columns.values()], device), strict=True))
    return MicroBatch(
        input_ids=row["ids"][None],
        position_ids=row["position"][None],
        packing=Packing(
            prompt_start, prompt, row_start, inputs, first, row["position"], row.get("routes")
        ),
        predict_from=row["predict_from"],
        targets=row["targets"],
        token_index=token_index,
        sequence_index=sequences,
        sequence_of=row["sequence_of"],
        token_at=row["token_at"] if last_tokens else None,
    )
