"""The running batch: one row per sequence, rows 0 .. n-1 in use, bookkeeping in arrays. Python code
runs per row only when a row joins or leaves, never per row and step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.payloads.routes import UNKNOWN, Routes
from rollout_worker.engine.base import Completion, Finish, Request, Spans, merge_spans
from rollout_worker.engine.transformers.sampler import SamplerRows, uniforms

_STATE = np.dtype(
    [
        ("prompt", np.int64),
        ("count", np.int64),
        ("limit", np.int64),
        ("reported", np.int64),
        ("key", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("top_k", np.int32),
        ("greedy", np.bool_),
        ("stops", np.bool_),
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Ended:
    """A completion that leaves the batch, or its present state. ``completion`` None: the model's
    output for it was not finite, or it has no token yet."""

    request_id: str
    index: int
    completion: Completion | None


@dataclass(slots=True)
class SequenceRow:
    request: Request
    index: int
    key: np.uint64
    prefix: Completion | None
    spans: Spans = ()  # Version spans of the tokens of earlier versions
    prompt_routes: Routes | None = None

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Input of its prefill: the prompt and the prefix."""
        if self.prefix is None:
            return self.request.prompt_tokens
        return np.concatenate([self.request.prompt_tokens, self.prefix.tokens])

    @property
    def longest(self) -> int:
        return len(self.request.prompt_tokens) + self.request.params.max_tokens

    def close_span(self, version: int, count: int) -> None:
        """The tokens up to ``count`` were made by ``version``."""
        covered = sum(length for _, length in self.spans)
        self.spans = merge_spans([*self.spans, (version, count - covered)])


class RunningBatch:
    def __init__(self, rows: int) -> None:
        self.version = -1  # Version of the weights that make the next tokens
        self.size = 0
        self.owners: list[SequenceRow] = []
        self._state = np.zeros(rows, dtype=_STATE)
        self._tokens = np.zeros((rows, 32), dtype=np.int32)
        self._logprobs = np.zeros((rows, 32), dtype=np.float32)
        self._routes: Routes | None = None  # [rows, length, W], once the engine notes them

    def join(self, sequences: Sequence[SequenceRow]) -> slice:
        """Appends rows for sequences whose prefill is done; returns the rows."""
        start = self.size
        for row, sequence in enumerate(sequences, start):
            prefix, params = sequence.prefix, sequence.request.params
            count = 0
            if prefix is not None:
                count = len(prefix.tokens)
                self._widen(count + 1)
                self._tokens[row, :count] = prefix.tokens
                self._logprobs[row, :count] = prefix.logprobs
                if self._routes is not None:
                    self._routes[row, :count] = UNKNOWN
                sequence.spans = prefix.versions
            self._state[row] = (
                len(sequence.request.prompt_tokens),
                count,
                params.max_tokens,
                count,
                sequence.key,
                params.temperature,
                params.top_p,
                params.top_k,
                params.greedy,
                bool(params.stop),
            )
            self.owners.append(sequence)
        self.size += len(sequences)
        return slice(start, self.size)

    def positions(self) -> NDArray[np.int64]:
        """Position of each row's newest token, which is fed next."""
        state = self._state[: self.size]
        positions: NDArray[np.int64] = state["prompt"] + state["count"] - 1
        return positions

    def longest(self) -> int:
        """Tokens that the longest row may reach; 0 for an empty batch."""
        state = self._state[: self.size]
        return int((state["prompt"] + state["limit"]).max()) if self.size else 0

    def newest(self) -> NDArray[np.int64]:
        count = self._state["count"][: self.size]
        newest: NDArray[np.int32] = self._tokens[np.arange(self.size), count - 1]
        return newest.astype(np.int64)

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
        """Adds a token to each of ``rows``. Returns which are at their limit, which have stops."""
        state = self._state[rows]
        count = state["count"]
        self._widen(int(count.max()) + 1)
        at = np.arange(rows.start, rows.stop)
        self._tokens[at, count] = tokens
        self._logprobs[at, count] = logprobs
        if self._routes is not None:
            self._routes[at, count] = UNKNOWN
        state["count"] = count + 1
        return state["count"] >= state["limit"], state["stops"]

    def note(self, routes: NDArray[np.int64]) -> None:
        """``routes`` [size, W] of each row's newest token, which was fed."""
        if self._routes is None:
            shape = (*self._tokens.shape, routes.shape[1])
            self._routes = np.full(shape, UNKNOWN, np.uint16)
        self._routes[np.arange(self.size), self._state["count"][: self.size] - 1] = routes

    def tokens(self, row: int) -> NDArray[np.int32]:
        return self._tokens[row, : self._state["count"][row]]

    def ended(self, row: int, finish: Finish, stop: str | None = None) -> Ended:
        """The row's tokens so far, copied."""
        count = int(self._state["count"][row])
        owner = self.owners[row]
        owner.close_span(self.version, count)
        completion = Completion(
            self._tokens[row, :count].copy(),
            self._logprobs[row, :count].copy(),
            owner.spans,
            finish,
            stop,
            None if owner.prompt_routes is None else self._routes_of(row, count),
            owner.prompt_routes,
        )
        return Ended(owner.request.request_id, owner.index, completion)

    def _routes_of(self, row: int, count: int) -> Routes:
        if self._routes is None:  # every row has ended at its first token
            width = self.owners[row].prompt_routes.shape[1]  # type: ignore[union-attr]
            return np.full((count, width), UNKNOWN, np.uint16)
        return self._routes[row, :count].copy()

    def due(self, every: int) -> list[Ended]:
        """All rows of requests with a row that has ``every`` tokens more than last reported."""
        state = self._state[: self.size]
        due = np.flatnonzero(state["count"] - state["reported"] >= every)
        if not len(due):
            return []
        rows = self.rows_of({self.owners[row].request.request_id for row in due})
        state["reported"][rows] = state["count"][rows]
        return [self.ended(row, Finish.PARTIAL) for row in rows]

    def rows_of(self, request_ids: set[str]) -> list[int]:
        return [i for i, row in enumerate(self.owners) if row.request.request_id in request_ids]

    def set_version(self, version: int) -> None:
        for owner, count in zip(self.owners, self._state["count"][: self.size], strict=True):
            owner.close_span(self.version, int(count))
        self.version = version

    def leave(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Removes ``rows`` (ascending, unique) and fills the gaps with the last rows. Returns
        (sources, targets): the moves, which the cache must repeat."""
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
            if self._routes is not None:
                self._routes[targets, :longest] = self._routes[sources, :longest]
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
        if self._routes is not None:
            wider = ((0, 0), (0, more), (0, 0))
            self._routes = np.pad(self._routes, wider, constant_values=UNKNOWN)


@dataclass
class Admission:
    """First come, first served, by whole requests, so that a request's samples share one prefill. A
    prefill has a fixed cost. While the batch is nearly full, new requests wait until an eighth of
    the slots is free, or until all of them can join: so each prefill serves many rows."""

    slots: int
    cache_tokens: int  # Tokens that the cache may hold, over all rows at their longest
    waiting: int = 0
    _queue: deque[deque[SequenceRow]] = field(default_factory=deque)

    def add(self, rows: list[SequenceRow]) -> None:
        self._queue.append(deque(rows))
        self.waiting += len(rows)

    def remove(self, request_ids: set[str]) -> list[SequenceRow]:
        """Takes the rows of these requests out of the queue."""
        rows = [r for entry in self._queue for r in entry if r.request.request_id in request_ids]
        self._queue = deque(e for e in self._queue if e[0].request.request_id not in request_ids)
        self.waiting -= len(rows)
        return rows

    def take(self, running: int, longest: int) -> list[SequenceRow]:
        """Rows that join a batch of ``running`` rows, whose longest may reach ``longest`` tokens.
        An empty batch gets at least one: the cache holds any one sequence."""
        batch = max(1, self.slots // 8)
        free = self.slots - running
        if not self.waiting or (running and free < min(batch, self.waiting)):
            return []
        taken: list[SequenceRow] = []
        while self._queue and free:
            entry = self._queue[0]
            longest = max(longest, entry[0].longest)
            # Every row of the cache is as long as the longest.
            room = min(free, self.cache_tokens // longest - running - len(taken))
            if room <= 0:
                break
            if len(entry) > room and len(entry) <= batch and (running or taken):
                break
            for _ in range(min(room, len(entry))):
                taken.append(entry.popleft())
                free -= 1
            if not entry:
                self._queue.popleft()
        self.waiting -= len(taken)
        return taken
