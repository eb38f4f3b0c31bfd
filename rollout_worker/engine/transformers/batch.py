"""The running batch: one row a sequence, rows 0 .. n-1 in use, bookkeeping in arrays.

No Python work is done per row and step; only where a row joins or leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout_worker.engine.base import Completion, Finish
from rollout_worker.engine.transformers.rng import uniforms
from rollout_worker.engine.transformers.sampler import SamplerRows

_STATE = np.dtype(
    [
        ("prompt", np.int64),
        ("count", np.int64),
        ("limit", np.int64),
        ("told", np.int64),
        ("last", np.int64),
        ("key", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("greedy", np.bool_),
        ("stops", np.bool_),
    ],
    align=True,
)


@dataclass(slots=True)
class SequenceRow:
    """One sample on its way: who wants it and which versions made its tokens so far."""

    request_id: str
    index: int
    prompt: NDArray[np.int32]
    limit: int
    key: np.uint64
    temperature: float
    top_p: float
    top_k: int
    greedy: bool
    stop: tuple[str, ...]
    prefix: Completion | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, length) of the tokens that earlier versions made."""
    covered: int = 0
    """Tokens that spans covers."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """What its prefill reads: the prompt and what an earlier owner generated."""
        if self.prefix is None:
            return self.prompt
        return np.concatenate([self.prompt, self.prefix.tokens])

    @property
    def longest(self) -> int:
        return len(self.prompt) + self.limit

    def close_span(self, version: int, count: int) -> None:
        """The tokens up to ``count`` were made by ``version``."""
        if count > self.covered:
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1] = (version, self.spans[-1][1] + count - self.covered)
            else:
                self.spans.append((version, count - self.covered))
            self.covered = count


class RunningBatch:
    def __init__(self, rows: int) -> None:
        self.size = 0
        self.owners: list[SequenceRow] = []
        self._state = np.zeros(rows, dtype=_STATE)
        self._tokens = np.zeros((rows, 32), dtype=np.int32)
        self._logprobs = np.zeros((rows, 32), dtype=np.float32)

    def join(self, sequences: Sequence[SequenceRow]) -> slice:
        """Appends rows for sequences whose prefill is done; returns the rows."""
        start = self.size
        for row, sequence in enumerate(sequences, start):
            prefix = sequence.prefix
            count = 0
            if prefix is not None:
                count = len(prefix.tokens)
                self._widen(count + 1)
                self._tokens[row, :count] = prefix.tokens
                self._logprobs[row, :count] = prefix.logprobs
                sequence.spans = list(prefix.versions)
                sequence.covered = count
            self._state[row] = (
                len(sequence.prompt),
                count,
                sequence.limit,
                count,
                0,
                sequence.key,
                sequence.temperature,
                sequence.top_p,
                sequence.top_k,
                sequence.greedy,
                bool(sequence.stop),
            )
            self.owners.append(sequence)
        self.size += len(sequences)
        return slice(start, self.size)

    def positions(self) -> NDArray[np.int64]:
        """Where the newest token of each row stands in its sequence: the next one to be fed."""
        state = self._state[: self.size]
        positions: NDArray[np.int64] = state["prompt"] + state["count"] - 1
        return positions

    def longest(self) -> int:
        """Tokens that the longest row may reach; 0 for an empty batch."""
        state = self._state[: self.size]
        return int((state["prompt"] + state["limit"]).max()) if self.size else 0

    def newest(self) -> NDArray[np.int64]:
        return np.ascontiguousarray(self._state["last"][: self.size])

    def sampling(self, rows: slice) -> SamplerRows:
        """Parameters and random numbers of the next token of ``rows``."""
        state = self._state[rows]
        return SamplerRows(
            state["temperature"],
            state["top_p"],
            state["top_k"],
            state["greedy"],
            uniforms(state["key"], state["count"]),
        )

    def append(
        self, rows: slice, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Adds a token to each of ``rows``. Returns which are now at their limit, which have stop
        strings to look for."""
        state = self._state[rows]
        count = state["count"]
        self._widen(int(count.max()) + 1)
        at = np.arange(rows.start, rows.stop)
        self._tokens[at, count] = tokens
        self._logprobs[at, count] = logprobs
        state["last"] = tokens
        state["count"] = count + 1
        return state["count"] >= state["limit"], state["stops"]

    def completion(self, row: int) -> NDArray[np.int32]:
        return self._tokens[row, : self._state["count"][row]]

    def sample(self, row: int, version: int, finish: Finish, stop: str | None = None) -> Completion:
        """The row's tokens so far, copied."""
        count = int(self._state["count"][row])
        owner = self.owners[row]
        owner.close_span(version, count)
        return Completion(
            self._tokens[row, :count].copy(),
            self._logprobs[row, :count].copy(),
            tuple(owner.spans),
            finish,
            stop,
        )

    def due(self, every: int) -> NDArray[np.int64]:
        """Rows with ``every`` tokens more than when they were told of last."""
        state = self._state[: self.size]
        return np.flatnonzero(state["count"] - state["told"] >= every)

    def mark_told(self, rows: list[int]) -> None:
        self._state["told"][rows] = self._state["count"][rows]

    def mark_version(self, version: int) -> None:
        """All tokens so far were made by ``version`` or before: weights are about to change."""
        for owner, count in zip(self.owners, self._state["count"][: self.size], strict=True):
            owner.close_span(version, int(count))

    def leave(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Takes ``rows`` (ascending, unique) out and closes the gaps with the last rows.

        Returns (sources, targets): the moves made, which the cache must make too.
        """
        size = self.size - len(rows)
        targets = rows[rows < size]
        staying = np.ones(self.size - size, dtype=bool)
        staying[rows[rows >= size] - size] = False
        sources = np.flatnonzero(staying) + size
        if len(sources):
            self._state[targets] = self._state[sources]
            longest = int(self._state["count"][targets].max())
            self._tokens[targets, :longest] = self._tokens[sources, :longest]
            self._logprobs[targets, :longest] = self._logprobs[sources, :longest]
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                self.owners[target] = self.owners[source]
        del self.owners[size:]
        self.size = size
        return sources, targets

    def _widen(self, columns: int) -> None:
        if columns <= self._tokens.shape[1]:
            return
        more = max(columns, 2 * self._tokens.shape[1]) - self._tokens.shape[1]
        self._tokens = np.pad(self._tokens, ((0, 0), (0, more)))
        self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more)))
