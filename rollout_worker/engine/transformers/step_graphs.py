"""Decode steps as CUDA graphs: one launch a token, and one wait for the device.

    tokens, positions, sampling ──► inputs ──► decode, sample ──► outputs ──► host
                                    copy       one graph          copy, awaited

A graph repeats the operations of one step, on the memory that they had when it was captured. So
nothing may move: inputs and outputs are buffers that last as long as the engine, weights are
swapped in place, and all graphs are captured again after the cache has grown. Shapes stay as well:
a step has as many rows, and attends to as many positions, as the next of a few sizes. Rows beyond
the batch lie in slots of the cache that nobody uses; what they draw is dropped.

The first step of a size runs operator by operator, and then it is captured. If a capture fails,
every step runs operator by operator. It does the same arithmetic, and so the same bits.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.process.structured_log import event, first_line
from rollout_worker.engine.transformers import sampler
from rollout_worker.engine.transformers.decoder import Decoder, SlotCache
from rollout_worker.engine.transformers.sampler import SamplerRows

logger = logging.getLogger(__name__)

_SHORTEST = 128
"""Positions that a step or a prefill has at least."""
_TOKEN, _POSITION, _GREEDY, _TEMPERATURE, _UNIFORM = range(5)
"""Lines of the inputs, int32; the last two have the bits of float32."""


class Graph(Protocol):
    def capture(self, step: Callable[[], None]) -> None:
        """Records what ``step`` queues on the device. Nothing of it is computed."""

    def replay(self) -> None:
        """Queues it again."""


NewGraph = Callable[[Graph | None], Graph]
"""Makes a graph that shares its working memory with the given one: they never run at once."""


class CudaGraph:
    def __init__(self, other: Graph | None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = other._graph.pool() if isinstance(other, CudaGraph) else None

    def capture(self, step: Callable[[], None]) -> None:
        # Other threads receive weights meanwhile. Their allocations would end a capture that
        # watches the whole process.
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
            step()

    def replay(self) -> None:
        self._graph.replay()


class StepGraphs:
    """``slots``: most rows of a batch. ``context``: most tokens of a sequence."""

    def __init__(
        self, decoder: Decoder, cache: SlotCache, slots: int, context: int, new_graph: NewGraph
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self._slots, self._context = slots, context
        self._new_graph: NewGraph | None = new_graph
        device = decoder.shape.device
        self._inputs = torch.zeros((5, slots), dtype=torch.int32, device=device)
        self._outputs = torch.zeros((2, slots), dtype=torch.int32, device=device)
        page_locked = device.type == "cuda"
        self._fed, self._drawn = (
            torch.zeros_like(buffer, device="cpu", pin_memory=page_locked)
            for buffer in (self._inputs, self._outputs)
        )
        self._logits: Tensor | None = None
        """Float32 [slots, vocabulary]: for batches with top-p or top-k, which is no part of a
        graph."""
        self._graphs: dict[tuple[int, int, bool], Graph] = {}
        self._moves = cache.moves
        decoder.reach(context)

    def prefill_sizes(self, sequences: int, tokens: int) -> tuple[int, int]:
        """The next sizes that a prefill of ``sequences`` of ``tokens`` is padded to. Nothing is
        padded for recurrent layers, which take sequences of one length at a time."""
        if self._decoder.shape.states:
            return sequences, tokens
        return _size(sequences), _size(tokens, _SHORTEST, self._context)

    def step(
        self, tokens: NDArray[np.int64], positions: NDArray[np.int64], sampling: SamplerRows
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Feeds one token to each of rows 0 .. n-1 at its position and draws the next one. Returns
        tokens int64 [n] and log-probs float32 [n], as sampler.sample does."""
        n, longest = len(tokens), int(positions.max()) + 1
        rows = _size(n, most=self._slots)
        length = _size(longest, _SHORTEST, self._context)
        self._cache.reserve(rows, length, n, min(longest, self._cache.length))
        filtered = bool(sampling.filtered.any())
        self._feed(rows, tokens, positions, sampling)
        self._run(rows, length, filtered)
        if filtered:
            assert self._logits is not None
            return sampler.sample(self._logits[:n], sampling)
        self._drawn.copy_(self._outputs)
        drawn, logprobs = self._drawn.numpy()[:, :n]
        return drawn.astype(np.int64), logprobs.view(np.float32).copy()

    def drop(self, cache: SlotCache) -> None:
        """Frees the memory of graphs; steps go on over ``cache``."""
        self._graphs.clear()
        self._logits, self._cache, self._moves = None, cache, cache.moves

    def _feed(
        self,
        rows: int,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        sampling: SamplerRows,
    ) -> None:
        n, fed = len(tokens), self._fed.numpy()
        fed[_TOKEN, :n] = tokens
        fed[_POSITION, :n] = positions
        fed[_GREEDY, :n] = sampling.greedy
        reals = fed.view(np.float32)
        reals[_TEMPERATURE, :n] = np.where(sampling.greedy, 1, sampling.temperature)
        reals[_UNIFORM, :n] = sampling.uniform
        fed[:_TEMPERATURE, n:rows] = 0
        reals[_TEMPERATURE:, n:rows] = 1
        self._inputs.copy_(self._fed, non_blocking=True)

    def _run(self, rows: int, length: int, filtered: bool) -> None:
        if self._moves != self._cache.moves:
            self._graphs.clear()
            self._moves = self._cache.moves
        if (graph := self._graphs.get((rows, length, filtered))) is not None:
            graph.replay()
            return
        self._compute(rows, length, filtered)
        if self._new_graph is None:
            return
        graph = self._new_graph(next(iter(self._graphs.values()), None))
        try:
            graph.capture(lambda: self._compute(rows, length, filtered))
        except Exception as error:  # of any operator of any model: the step above has done without
            words = "no CUDA graph of the decode step: it runs operator by operator"
            event(logger, words, logging.WARNING, error=first_line(error))
            self._new_graph = None
            self._graphs.clear()
            return
        self._graphs[rows, length, filtered] = graph

    def _compute(self, rows: int, length: int, filtered: bool) -> None:
        fed = self._inputs[:, :rows]
        reals = fed[_TEMPERATURE:].view(torch.float32)
        tokens, positions = fed[_TOKEN].long(), fed[_POSITION].long()
        logits = self._decoder.decode(self._cache, tokens, positions, length)
        if filtered:
            if self._logits is None:
                self._logits = logits.new_zeros((self._slots, logits.shape[1]))
            self._logits[:rows].copy_(logits)
            return
        token, logprob = sampler.draw(logits / reals[0, :, None], reals[1])
        likeliest, its_logprob = sampler.likeliest(logits)
        greedy = fed[_GREEDY] > 0
        self._outputs[0, :rows].copy_(torch.where(greedy, likeliest, token))
        self._outputs[1, :rows].copy_(torch.where(greedy, its_logprob, logprob).view(torch.int32))


def _size(needed: int, least: int = 1, most: int = 1 << 62) -> int:
    """``needed``, rounded up to a power of two or three quarters of one, within the bounds."""
    power = 1 << (needed - 1).bit_length()
    size = power * 3 // 4 if needed <= power * 3 // 4 else power
    return max(needed, min(max(size, least), most))
