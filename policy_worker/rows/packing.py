"""Packing: micro-batches without padding, as rows of prompts and completions.

A row is [prompt, completion 1, completion 2, ...] for one group after the other. The prompt appears
once and all completions of the group attend to it, so its forward is shared. The last token of a
completion is an input only if a scalar head reads it: nothing is predicted from it.

    row        p p p p a a a b b | p p p c c c c
    position   0 1 2 3 4 5 6 4 5 | 0 1 2 3 4 5 6
    predicts   . . . * a a a b b     (the last prompt token predicts the first of a and of b)
"""

import numpy as np
import torch
from torch import Tensor

from policy_worker.model.attention import Block, MicroBatch, Packing, RowPattern
from policy_worker.objectives.batch import GroupLengths, Ints, TokenBatch

BLOCK_SCORES = {"cpu": 4096}
"""Scores of padding that take about as long as another attention block, by device. Measured with
a small model: 2,000 to 8,000 are equally fast."""
GPU_BLOCK_SCORES = 1 << 20
"""The same on other devices, which wait for kernels rather than for scores. Estimated from the time
of a kernel's launch, not measured."""


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
    # Row layout.
    row_start = np.cumsum(inputs + np.where(first, prompt, 0)) - inputs
    prompt_start = (row_start - prompt)[np.maximum.accumulate(np.where(first, _iota(first), 0))]
    total = int(row_start[-1] + inputs[-1])
    ids = np.empty(total, dtype=np.int64)
    positions = np.empty(total, dtype=np.int64)
    prompt_offset = np.cumsum(batch.prompt_length) - batch.prompt_length
    token_offset = (np.cumsum(batch.length) - batch.length)[sequences]
    heads = np.flatnonzero(first)
    place, within = _ranges(prompt_start[heads], prompt[heads])
    ids[place] = batch.prompt_tokens[_ranges(prompt_offset[group[heads]], prompt[heads])[0]]
    positions[place] = within
    place, within = _ranges(row_start, inputs)
    ids[place] = batch.tokens[_ranges(token_offset, inputs)[0]]
    positions[place] = within + np.repeat(prompt, inputs)
    # Targets: token j of a completion is predicted from its token j - 1, the first from the prompt.
    token_index, within = _ranges(token_offset, length)
    sequence_of = np.repeat(_iota(first), length)
    predict_from = np.where(
        within == 0, (prompt_start + prompt - 1)[sequence_of], row_start[sequence_of] + within - 1
    )
    position_ids = _tensor(positions, device)
    return MicroBatch(
        input_ids=_tensor(ids, device)[None],
        position_ids=position_ids[None],
        packing=Packing(
            *_attention_blocks(prompt_start, prompt, row_start, inputs, first, total, device),
            _row_pattern(prompt_start, prompt, row_start, inputs, first, position_ids),
        ),
        predict_from=_tensor(predict_from, device),
        targets=_tensor(batch.tokens[token_index], device),
        token_index=token_index,
        sequence_index=sequences,
        sequence_of=_tensor(sequence_of, device),
        token_at=_tensor(row_start[sequence_of] + within, device) if last_tokens else None,
    )


def _attention_blocks(
    prompt_start: Ints,
    prompt: Ints,
    row_start: Ints,
    inputs: Ints,
    first: np.ndarray,
    total: int,
    device: torch.device,
) -> tuple[tuple[Block, ...], Tensor]:
    full = prompt + inputs
    collapse = np.empty(total, dtype=np.int64)
    blocks: list[Block] = []
    offset = 0
    for members in _similar(full, BLOCK_SCORES.get(device.type, GPU_BLOCK_SCORES)):
        longest = int(full[members].max())
        grid = np.arange(longest)[None, :]
        p, n = prompt[members][:, None], full[members][:, None]
        gather = np.where(
            grid < p, prompt_start[members][:, None] + grid, row_start[members][:, None] + grid - p
        )
        real = grid < n
        slot = offset + np.arange(gather.size).reshape(gather.shape)
        # A prompt's output is taken from the first sequence of its group, all copies being equal.
        own = real & ((grid >= p) | first[members][:, None])
        collapse[gather[own]] = slot[own]
        # Padding repeats the sequence's last token: a real row position, spread over the row.
        gather = np.where(real, gather, gather[np.arange(len(members)), n[:, 0] - 1][:, None])
        blocks.append(Block(_tensor(gather.reshape(-1), device), len(members), longest))
        offset += gather.size
    return tuple(blocks), _tensor(collapse, device)


def _row_pattern(
    prompt_start: Ints,
    prompt: Ints,
    row_start: Ints,
    inputs: Ints,
    first: np.ndarray,
    position: Tensor,
) -> RowPattern:
    """Group and sequence of each token of the row; ``position``: int64 [T]."""
    group, sequence = np.empty((2, len(position)), dtype=np.int64)
    number = np.cumsum(first) - 1
    heads = np.flatnonzero(first)
    place, _ = _ranges(prompt_start[heads], prompt[heads])
    group[place], sequence[place] = np.repeat(number[heads], prompt[heads]), -1
    place, _ = _ranges(row_start, inputs)
    group[place], sequence[place] = np.repeat(number, inputs), np.repeat(_iota(first), inputs)
    device = position.device
    return RowPattern(_tensor(group, device), _tensor(sequence, device), position)


def _similar(full: Ints, block_scores: int) -> list[Ints]:
    """Members of each block: the split by length with the fewest scores, padding included, if
    each block costs ``block_scores`` more."""
    lengths, counts = np.unique(full, return_counts=True)
    until = np.r_[0, np.cumsum(counts)]
    fewest, begins = np.zeros(len(lengths) + 1), np.zeros(len(lengths), dtype=np.int64)
    for last, length in enumerate(lengths):
        sequences = until[last + 1] - until[: last + 1]
        scores = fewest[: last + 1] + sequences * float(length) ** 2 + block_scores
        begins[last] = scores.argmin()
        fewest[last + 1] = scores.min()
    blocks: list[Ints] = []
    last = len(lengths) - 1
    while last >= 0:
        first = begins[last]
        blocks.append(np.flatnonzero((full >= lengths[first]) & (full <= lengths[last])))
        last = first - 1
    return blocks[::-1]


def _ranges(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Concatenation of ``range(s, s + n)``, and each element's place in its range."""
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within, within


def _iota(like: np.ndarray) -> Ints:
    return np.arange(len(like), dtype=np.int64)


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device, non_blocking=True)
