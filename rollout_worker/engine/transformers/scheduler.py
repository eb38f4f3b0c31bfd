"""One step of continuous batching. Single-threaded; the engine's thread owns it.

step:  decode one token of every row ──► finished rows leave, the last rows fill the gaps
       admit waiting rows ──► prefill (each distinct prompt once) ──► first token of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_worker.engine.base import Completion, Finish, Request
from rollout_worker.engine.stopping import Decode, EndTokens, StopStrings, TokenTexts
from rollout_worker.engine.transformers import sampler
from rollout_worker.engine.transformers.admission import Admission
from rollout_worker.engine.transformers.batch import RunningBatch, SequenceRow
from rollout_worker.engine.transformers.decoder import Decoder
from rollout_worker.engine.transformers.kv_cache import SlotCache
from rollout_worker.engine.transformers.rng import sample_keys

_PREFILL_TOKENS = 16384
"""Padded tokens of one prefill forward; bounds its memory and how long decoding waits for it."""
_STOPS = 64
"""Cached sets of stop strings, each of one byte per token of the vocabulary. Environments and their
clients may use new ones with every turn."""


@dataclass(frozen=True, slots=True)
class Ended:
    """``completion`` None: the model's output for this row was not finite."""

    request_id: str
    index: int
    completion: Completion | None


class Scheduler:
    def __init__(
        self,
        decoder: Decoder,
        *,
        slots: int,
        cache_tokens: int,
        end_tokens: EndTokens,
        decode_text: Decode,
        vocabulary: int,
    ) -> None:
        self._decoder = decoder
        self._device = decoder.shape.device
        self._cache = SlotCache(decoder.shape)
        self._batch = RunningBatch(slots)
        self._admission = Admission(slots, cache_tokens)
        self._end_tokens = end_tokens
        self._decode_text = decode_text
        self._vocabulary = vocabulary
        self.token_texts = TokenTexts(decode_text, vocabulary)
        self._stop_strings = lru_cache(_STOPS)(self._make_stop_strings)
        self.version = -1
        self.tokens = 0
        self.steps = 0

    @property
    def running(self) -> int:
        return self._batch.size

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    def add(self, request: Request) -> list[Ended]:
        """Queues a request; returns completions whose prefix is already complete."""
        params = request.params
        keys = sample_keys(params.seed, np.arange(request.count))
        ended: list[Ended] = []
        rows: list[SequenceRow] = []
        for index in range(request.count):
            prefix = request.prefixes[index] if request.prefixes else None
            if prefix is not None and _complete(prefix, params.max_tokens):
                ended.append(Ended(request.request_id, index, prefix))
                continue
            rows.append(
                SequenceRow(
                    request.request_id,
                    index,
                    request.prompt_tokens,
                    params.max_tokens,
                    keys[index],
                    params.temperature,
                    params.top_p,
                    params.top_k,
                    params.greedy,
                    params.stop,
                    prefix if prefix is not None and len(prefix.tokens) else None,
                )
            )
        if rows:
            self._admission.add(rows)
        return ended

    @torch.inference_mode()
    def remove(self, request_ids: set[str]) -> list[Ended]:
        """Removes requests, running or not; returns their unfinished rows."""
        ended = [
            Ended(row.request_id, row.index, row.prefix)
            for row in self._admission.remove(request_ids)
        ]
        hit = [i for i, owner in enumerate(self._batch.owners) if owner.request_id in request_ids]
        for row in hit:
            owner = self._batch.owners[row]
            partial = self._batch.completion(row, self.version, Finish.PARTIAL)
            ended.append(Ended(owner.request_id, owner.index, partial))
        self._leave(np.array(hit, dtype=np.int64))
        return ended

    def due(self, every: int) -> list[Ended]:
        """Running rows of the requests that are due for a report: one of their rows has ``every`` tokens
        more than at the last one."""
        batch = self._batch
        ids = {batch.owners[row].request_id for row in batch.due(every)}
        if not ids:
            return []
        rows = [row for row, owner in enumerate(batch.owners) if owner.request_id in ids]
        batch.mark_reported(rows)
        return [
            Ended(
                owner.request_id, owner.index, batch.completion(row, self.version, Finish.PARTIAL)
            )
            for row, owner in ((row, batch.owners[row]) for row in rows)
        ]

    def set_version(self, version: int) -> None:
        """The weights have been replaced; the next tokens are of ``version``."""
        self._batch.mark_version(self.version)
        self.version = version
        self._decoder.refresh()

    @torch.inference_mode()
    def step(self) -> list[Ended]:
        """One token for every running row and every row that joins."""
        self.steps += 1
        ended = self._decode() if self._batch.size else []
        joining = self._admission.take(self._batch.size, self._batch.longest())
        if joining:
            ended += self._join(joining)
        return ended

    def _decode(self) -> list[Ended]:
        batch = self._batch
        positions = batch.positions()
        length = int(positions.max()) + 1
        self._cache.reserve(batch.size, length, batch.size, min(length, self._cache.length))
        logits = self._decoder.decode(
            self._cache, self._to_device(batch.newest()), self._to_device(positions), length
        )
        return self._take_tokens(slice(0, batch.size), logits)

    def _join(self, joining: list[SequenceRow]) -> list[Ended]:
        ended: list[Ended] = []
        for chunk in _chunks(joining):
            inputs, sources = _distinct(chunk)
            lengths = np.array([len(tokens) for tokens in inputs], dtype=np.int64)
            padded = np.zeros((len(inputs), lengths.max()), dtype=np.int64)
            for i, tokens in enumerate(inputs):
                padded[i, : len(tokens)] = tokens
            prefilled = self._decoder.prefill(self._to_device(padded), self._to_device(lengths))
            used = self._batch.size
            used_length = int(self._batch.positions().max()) + 1 if used else 0
            rows = self._batch.join(chunk)
            self._cache.reserve(rows.stop, padded.shape[1] + 1, used, used_length)
            source = self._to_device(np.array(sources, dtype=np.int64))
            self._cache.fill(
                self._to_device(np.arange(rows.start, rows.stop)),
                source,
                prefilled.keys,
                prefilled.values,
            )
            ended += self._take_tokens(rows, prefilled.logits.index_select(0, source))
        return ended

    def _take_tokens(self, rows: slice, logits: torch.Tensor) -> list[Ended]:
        """Samples a token for each of ``rows`` (the last of the batch) and removes those that end."""
        batch = self._batch
        tokens, logprobs = sampler.sample(logits, batch.sampling(rows))
        broken = ~np.isfinite(logprobs)
        at_limit, has_stops = batch.append(rows, tokens, logprobs)
        self.tokens += len(tokens)
        stopped = self._end_tokens(tokens)
        over = stopped | at_limit | broken
        found: dict[int, str] = {}
        if has_stops.any():
            found = self._find_stops(rows, tokens, has_stops & ~over | (has_stops & at_limit))
            for i in found:
                over[i - rows.start] = stopped[i - rows.start] = True
        leaving = np.flatnonzero(over)
        if len(leaving) == 0:
            return []
        ended: list[Ended] = []
        for i in leaving.tolist():
            row = rows.start + i
            owner = batch.owners[row]
            finish = Finish.STOP if stopped[i] else Finish.LENGTH
            completion = batch.completion(row, self.version, finish, found.get(row))
            ended.append(Ended(owner.request_id, owner.index, None if broken[i] else completion))
        if broken.any():
            # Non-finite values must not stay in the cache: a masked NaN is still a NaN.
            self._cache.clear(self._to_device(np.flatnonzero(broken) + rows.start))
        self._leave(leaving + rows.start)
        return ended

    def _find_stops(
        self, rows: slice, tokens: NDArray[np.int64], candidates: NDArray[np.bool_]
    ) -> dict[int, str]:
        found: dict[int, str] = {}
        for i in np.flatnonzero(candidates).tolist():
            row = rows.start + i
            stops = self._stop_strings(self._batch.owners[row].stop)
            if not stops.may_end(tokens[i : i + 1])[0]:
                continue
            if (hit := stops.found(self._batch.tokens(row))) is not None:
                found[row] = hit
        return found

    def _make_stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        return StopStrings(strings, self._decode_text, self._vocabulary, self.token_texts)

    def _leave(self, rows: NDArray[np.int64]) -> None:
        if len(rows) == 0:
            return
        sources, targets = self._batch.leave(rows)
        if len(sources):
            length = min(int(self._batch.positions().max()) + 1, self._cache.length)
            self._cache.move(self._to_device(sources), self._to_device(targets), length)

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _complete(prefix: Completion, max_tokens: int) -> bool:
    return prefix.finish is not Finish.PARTIAL or len(prefix.tokens) >= max_tokens


def _chunks(rows: list[SequenceRow]) -> list[list[SequenceRow]]:
    """Splits joining rows, in order, into prefills of at most ``_PREFILL_TOKENS`` padded tokens."""
    chunks: list[list[SequenceRow]] = [[]]
    longest = distinct = 0
    for row in rows:
        chunk = chunks[-1]
        new = not chunk or chunk[-1].prompt is not row.prompt or row.prefix is not None
        tokens = len(row.prompt) + (0 if row.prefix is None else len(row.prefix.tokens))
        if chunk and max(longest, tokens) * (distinct + new) > _PREFILL_TOKENS:
            chunks.append([])
            longest, distinct, new = 0, 0, True
        chunks[-1].append(row)
        longest = max(longest, tokens)
        distinct += new
    return chunks


def _distinct(rows: Sequence[SequenceRow]) -> tuple[list[NDArray[np.int32]], list[int]]:
    """The distinct token sequences to prefill, and the index of the sequence for each row."""
    inputs: list[NDArray[np.int32]] = []
    sources: list[int] = []
    shared: dict[str, int] = {}
    for row in rows:
        place = shared.get(row.request_id) if row.prefix is None else None
        if place is None:
            place = len(inputs)
            inputs.append(row.tokens)
            if row.prefix is None:
                shared[row.request_id] = place
        sources.append(place)
    return inputs, sources
