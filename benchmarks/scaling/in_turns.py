"""Generation alone, and colocated synchronous training: the same engines and device times without a
fleet.

Nothing but the devices costs time here: no control plane, no rewards, no payloads, a balance that
no scheduler can beat (any engine with a free slot takes the next sequence). A fleet is compared
with better than a real baseline.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.scaling.device_times import DeviceTimes
from benchmarks.scaling.emulated_engine import EmulatedEngine
from rollout_worker.engine.base import Completion, Request, SamplingParams

PROMPT = np.array([3, 4, 5, 6], dtype=np.int32)
VOCABULARY, CONTEXT = 15, 512
LETTERS, END = tuple(range(3, 13)), 2


@dataclass(frozen=True, slots=True)
class Batch:
    groups: int
    group_size: int

    @property
    def samples(self) -> int:
        return self.groups * self.group_size


async def generation_rate(times: DeviceTimes, seconds: float) -> float:
    """Tokens per second of one engine whose slots are always taken."""
    (engine,) = engines = await _start(times, 1)
    seeds = itertools.count()
    slots = [asyncio.create_task(_keep_busy(engine, seeds, times)) for _ in range(times.slots)]
    began, before = time.monotonic(), engine.stats().tokens
    await asyncio.sleep(seconds)
    rate = (engine.stats().tokens - before) / (time.monotonic() - began)
    for slot in slots:
        slot.cancel()
    await asyncio.gather(*slots, return_exceptions=True)
    await _close(engines)
    return rate


async def colocated_rate(times: DeviceTimes, gpus: int, batch: Batch, steps: int) -> float:
    """Tokens per second: all GPUs generate a batch, then all of them train on it, then they take
    the new weights."""
    engines = await _start(times, gpus)
    seeds = itertools.count()
    began, tokens = time.monotonic(), 0
    for _ in range(steps):
        made = await _generate(engines, [next(seeds) for _ in range(batch.groups)], batch, times)
        tokens += made
        await asyncio.sleep(times.training_s(made, gpus) + times.update_constant_s)
        await asyncio.gather(*(engine.load_weights(0, {}) for engine in engines))
    rate = tokens / (time.monotonic() - began)
    await _close(engines)
    return rate


async def _generate(
    engines: list[EmulatedEngine], seeds: list[int], batch: Batch, times: DeviceTimes
) -> int:
    """Tokens of one batch. Each slot of each engine takes the next sequence."""
    left = deque(
        (seed, length)
        for seed in seeds
        for length in times.lengths.draw(np.random.default_rng(seed), 1, batch.group_size)[0]
    )

    async def slot(engine: EmulatedEngine, number: int) -> int:
        tokens = 0
        while left:
            seed, length = left.popleft()
            made = await engine.generate(_request(f"{number}-{len(left)}", seed, int(length)))
            tokens += _tokens(made)
        return tokens

    # First one slot of every engine, then the second of every engine, and so on.
    slots = [slot(engine, n) for _ in range(times.slots) for n, engine in enumerate(engines)]
    return sum(await asyncio.gather(*slots))


async def _keep_busy(engine: EmulatedEngine, seeds: Iterator[int], times: DeviceTimes) -> None:
    while True:
        seed = next(seeds)
        ((length,),) = times.lengths.draw(np.random.default_rng(seed), 1, 1)
        await engine.generate(_request(str(seed), seed, int(length)))


def _request(name: str, seed: int, tokens: int) -> Request:
    return Request(name, PROMPT, SamplingParams(max_tokens=tokens, seed=seed), count=1)


def _tokens(made: tuple[Completion, ...]) -> int:
    return sum(len(completion.tokens) for completion in made)


async def _start(times: DeviceTimes, count: int) -> list[EmulatedEngine]:
    engines = [
        EmulatedEngine(times, vocabulary=VOCABULARY, context=CONTEXT, letters=LETTERS, end=END)
        for _ in range(count)
    ]
    for engine in engines:
        await engine.start()
        await engine.load_weights(0, {})
    return engines


async def _close(engines: list[EmulatedEngine]) -> None:
    for engine in engines:
        await engine.close()
