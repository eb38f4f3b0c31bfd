"""Generation alone: an engine whose slots are always taken, without a fleet."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.scaling.device_times import DeviceTimes
from benchmarks.scaling.emulated_engine import EmulatedEngine
from rollout_worker.engine.base import Request, SamplingParams

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
    engine = EmulatedEngine(times, vocabulary=VOCABULARY, context=CONTEXT, letters=LETTERS, end=END)
    await engine.start()
    await engine.load_weights(0, {})
    seeds = itertools.count()
    slots = [asyncio.create_task(_keep_busy(engine, seeds, times)) for _ in range(times.slots)]
    began, before = time.monotonic(), engine.stats().tokens
    await asyncio.sleep(seconds)
    rate = (engine.stats().tokens - before) / (time.monotonic() - began)
    for slot in slots:
        slot.cancel()
    await asyncio.gather(*slots, return_exceptions=True)
    await engine.close()
    return rate


async def _keep_busy(engine: EmulatedEngine, seeds: Iterator[int], times: DeviceTimes) -> None:
    while True:
        seed = next(seeds)
        ((length,),) = times.lengths.draw(np.random.default_rng(seed), 1, 1)
        params = SamplingParams(max_tokens=int(length), seed=seed)
        await engine.generate(Request(str(seed), PROMPT, params, count=1))
