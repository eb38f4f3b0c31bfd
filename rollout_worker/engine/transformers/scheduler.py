"""One step of continuous batching. Single-threaded; the engine's thread owns it.

step:  decode one token of every row ──► finished rows leave, the last rows fill the gaps
       admit waiting rows ──► prefill (each distinct prompt once) ──► first token of each
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_worker.engine.base import Finish, Request
from rollout_worker.engine.stopping import TokenTexts, ended_by
from rollout_worker.engine.transformers import sampler
from rollout_worker.engine.transformers.batch import Admission, Ended, RunningBatch, SequenceRow
from rollout_worker.engine.transformers.decoder import Decoder, SlotCache
from rollout_worker.engine.transformers.sampler import on_device, sample_keys
from rollout_worker.engine.transformers.step_graphs import NewGraph, StepGraphs

_PREFILL_TOKENS = 16384
"""Padded tokens of one prefill forward; bounds its memory and how long decoding waits for it."""


class Scheduler:
    """``context``: most tokens of a sequence. ``new_graph``: decode steps are captured by it."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        cache_tokens: int,
        context: int,
        end_tokens: Iterable[int],
        texts: TokenTexts,
        new_graph: NewGraph | None = None,
    ) -> None:
        self._decoder = decoder
        self._device = decoder.shape.device
        self._cache = SlotCache(decoder.shape, context)
        self._graphs: StepGraphs | None = None
        if new_graph is not None:
            self._graphs = StepGraphs(decoder, self._cache, slots, context, new_graph)
        self.batch = RunningBatch(slots)
        self.admission = Admission(slots, cache_tokens)
        self._ends = np.zeros(texts.vocabulary, dtype=bool)
        self._ends[[token for token in end_tokens if token < texts.vocabulary]] = True
        self._texts = texts
        self.tokens = 0

    def add(self, request: Request) -> list[Ended]:
        """Queues a request; returns completions whose prefix is already complete."""
        ended: list[Ended] = []
        rows: list[SequenceRow] = []
        keys = sample_keys(request.params.seed, np.arange(request.count))
        for index, key in enumerate(keys):
            prefix = request.prefix(index)
            if prefix is not None and (
                prefix.finish is not Finish.PARTIAL
                or len(prefix.tokens) >= request.params.max_tokens
            ):
                ended.append(Ended(request.request_id, index, prefix))
            else:
                rows.append(SequenceRow(request, index, key, prefix))
        if rows:
            self.admission.add(rows)
        return ended

    @torch.inference_mode()
    def remove(self, request_ids: set[str]) -> list[Ended]:
        """Removes requests, running or not; returns their unfinished rows."""
        ended = [
            Ended(row.request.request_id, row.index, row.prefix)
            for row in self.admission.remove(request_ids)
        ]
        rows = self.batch.rows_of(request_ids)
        ended += [self.batch.ended(row, Finish.PARTIAL) for row in rows]
        self._leave(np.array(rows, dtype=np.int64))
        return ended

    def drop_cache(self) -> None:
        """Frees the memory of the cache, when nothing runs."""
        self._cache = SlotCache(self._decoder.shape, self._cache.longest)
        if self._graphs is not None:
            self._graphs.drop(self._cache)

    def set_version(self, version: int) -> None:
        self.batch.set_version(version)
        self._decoder.refresh()

    @torch.inference_mode()
    def step(self) -> list[Ended]:
        ended = self._decode() if self.batch.size else []
        joining = self.admission.take(self.batch.size, self.batch.longest())
        if joining:
            ended += self._join(joining)
        return ended

    def _decode(self) -> list[Ended]:
        batch = self.batch
        rows, positions = slice(0, batch.size), batch.positions()
        if self._graphs is not None:
            drawn = self._graphs.step(batch.newest(), positions, batch.sampling(rows))
            return self._take(rows, *drawn)
        length = int(positions.max()) + 1
        self._cache.reserve(batch.size, length, batch.size, min(length, self._cache.length))
        logits = self._decoder.decode(
            self._cache, self._to_device(batch.newest()), self._to_device(positions), length
        )
        if self._decoder.routes is not None:
            batch.note(self._decoder.routes.cpu().numpy())
        return self._take(rows, *sampler.sample(logits, batch.sampling(rows)))

    def _join(self, joining: list[SequenceRow]) -> list[Ended]:
        ended: list[Ended] = []
        sizes = self._graphs.prefill_sizes if self._graphs else _as_they_are
        for prefill in _prefills(joining, sizes):
            tokens, lengths = prefill.padded()
            prefilled = self._decoder.prefill(self._to_device(tokens), self._to_device(lengths))
            used = self.batch.size
            used_length = int(self.batch.positions().max()) + 1 if used else 0
            rows = self.batch.join(prefill.rows)
            self._cache.reserve(rows.stop, tokens.shape[1] + 1, used, used_length)
            source = self._to_device(np.array(prefill.sources, dtype=np.int64))
            self._cache.fill(rows, source, prefilled)
            if prefilled.routes is not None:
                routes = prefilled.routes.cpu().numpy().astype(np.uint16)
                for row, place in zip(prefill.rows, prefill.sources, strict=True):
                    row.prompt_routes = routes[place, : len(row.request.prompt_tokens)]
            logits = prefilled.logits.index_select(0, source)
            ended += self._take(rows, *sampler.sample(logits, self.batch.sampling(rows)))
        return ended

    def _take(
        self, rows: slice, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> list[Ended]:
        """Adds a token to each of ``rows``, the last of the batch; removes those that end."""
        batch = self.batch
        broken = ~np.isfinite(logprobs)
        at_limit, has_stops = batch.append(rows, tokens, logprobs)
        self.tokens += len(tokens)
        stopped = self._ends[tokens]
        stops: dict[int, str] = {}
        for i in np.flatnonzero(has_stops & ~stopped & ~broken).tolist():
            row = rows.start + i
            given = batch.owners[row].request.params.stop
            if not self._texts.may_end(int(tokens[i]), given):
                continue
            if (stop := ended_by(given, batch.tokens(row), self._texts.decode)) is not None:
                stops[i], stopped[i] = stop, True
        leaving = np.flatnonzero(stopped | at_limit | broken)
        ended: list[Ended] = []
        for i in leaving.tolist():
            finish = Finish.STOP if stopped[i] else Finish.LENGTH
            item = batch.ended(rows.start + i, finish, stops.get(i))
            ended.append(replace(item, completion=None) if broken[i] else item)
        if broken.any():
            # Non-finite values must not stay in the cache: a masked NaN is still a NaN.
            self._cache.clear(self._to_device(np.flatnonzero(broken) + rows.start))
        self._leave(leaving + rows.start)
        return ended

    def _leave(self, rows: NDArray[np.int64]) -> None:
        if len(rows) == 0:
            return
        sources, targets = self.batch.leave(rows)
        if len(sources):
            length = min(int(self.batch.positions().max()) + 1, self._cache.length)
            self._cache.move(self._to_device(sources), self._to_device(targets), length)

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return on_device(array, self._device)


_Sizes = Callable[[int, int], tuple[int, int]]
"""Sequences and tokens that a prefill of so many sequences and tokens is padded to."""


def _as_they_are(sequences: int, tokens: int) -> tuple[int, int]:
    return sequences, tokens


@dataclass(slots=True)
class _Prefill:
    """Rows that join with one forward, and the distinct token sequences that it computes."""

    sizes: _Sizes
    rows: list[SequenceRow] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # The number of each row's sequence
    inputs: list[NDArray[np.int32]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # Numbers by identity of the sequence

    def padded(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens [sequences, longest], padded on the right, and lengths [sequences]. Sequences that
        pad the forward have one token, and no row."""
        padded = np.zeros(self.sizes(len(self.inputs), max(map(len, self.inputs))), dtype=np.int64)
        lengths = np.ones(len(padded), dtype=np.int64)
        for i, tokens in enumerate(self.inputs):
            padded[i, : len(tokens)] = tokens
            lengths[i] = len(tokens)
        return padded, lengths


def _prefills(rows: list[SequenceRow], sizes: _Sizes) -> Iterator[_Prefill]:
    """Splits joining rows, in order, into prefills of at most ``_PREFILL_TOKENS`` padded tokens."""
    prefill, longest = _Prefill(sizes), 0
    for row in rows:
        tokens = row.tokens
        # Completions of a request share its prompt.
        place = prefill.places.get(id(tokens))
        if place is None:
            longest = max(longest, len(tokens))
            padded = math.prod(sizes(len(prefill.inputs) + 1, longest))
            if prefill.inputs and padded > _PREFILL_TOKENS:
                yield prefill
                prefill, longest = _Prefill(sizes), len(tokens)
            place = prefill.places[id(tokens)] = len(prefill.inputs)
            prefill.inputs.append(tokens)
        prefill.rows.append(row)
        prefill.sources.append(place)
    yield prefill
