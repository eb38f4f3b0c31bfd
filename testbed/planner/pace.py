"""Pace of a run: synchronous on shared GPUs, and asynchronous on GPUs divided between policy and
rollout.

The asynchronous run is simulated: groups are dispatched by the ledger's admission rule, the oldest
ready ones train, late ones are kept, and engines go on with their running sequences after new
weights.
"""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from controller.ledger.limits import dispatch_limit
from testbed.planner.generation import Generation
from testbed.planner.system import System

SYNC_BATCHES = 16
"""Batches whose mean is a synchronous step: whether the longest completion reaches the limit moves
one by 8 %."""
WARM_UP, MEASURED = 3, 8
"""Steps before and in the measurement of an asynchronous run."""


@dataclass(frozen=True, slots=True)
class SimulatedPace:
    step_s: float
    samples_per_s: float
    policy_idle: float
    """Share of a trainer's time in which it has no batch, or waits for weights to be taken over."""
    rollout_idle: float
    """Share of the engines' time without a sequence to run."""
    staleness: float
    """Mean age in steps of the weights that a trained group began with."""
    group_s: float
    """From a group's lease to its last token."""
    publish_s: float
    """From a commit until engines serve its weights, pauses included."""


def generation_seconds(
    system: System, gpus: int, batches: int = SYNC_BATCHES, seed: int = 0
) -> float:
    """Of a whole batch on all GPUs, begun at once. The mean of ``batches``."""
    return float(np.mean([_one_batch(system, gpus, seed + n) for n in range(batches)]))


def _one_batch(system: System, gpus: int, seed: int) -> float:
    batch = system.batch
    rng = np.random.default_rng(seed)
    engines = Generation(
        system.engine, max(1, gpus // system.tp), batch.prompt_tokens, batch.lengths.cap
    )
    engines.add(0, batch.lengths.draw(rng, batch.groups, batch.group_size))
    last = 0.0
    while engines.busy:
        if ended := engines.advance(engines.tick_s):
            last = ended[-1][0]
    return last


def synchronous(
    system: System, gpus: int, *, log_prob: bool = False, batches: int = SYNC_BATCHES
) -> SimulatedPace:
    """Generation of the batch on all GPUs, then training on all of them. ``log_prob``: behaviour
    log-probs are recomputed in between."""
    generated = generation_seconds(system, gpus, batches)
    trained = system.update.seconds(gpus) + (system.log_prob.seconds(gpus) if log_prob else 0.0)
    step = generated + trained + system.rest_s
    return SimulatedPace(
        step,
        system.batch.samples / step,
        1 - trained / step,
        1 - generated / step,
        0.0,
        generated,
        0.0,
    )


def asynchronous(
    system: System,
    policy_gpus: int,
    rollout_gpus: int,
    max_staleness: float,
    *,
    log_prob: bool = False,
    updates_per_version: int = 1,
    seed: int = 0,
    steps: int = MEASURED,
) -> SimulatedPace:
    """``updates_per_version``: parts of a batch that train as soon as they are ready, before the
    next version."""
    run = _Simulation(
        system, policy_gpus, rollout_gpus, max_staleness, log_prob, updates_per_version, seed
    )
    run.until(WARM_UP)
    began, busy, empty = run.engines.now, run.busy_s, run.engines.empty_s
    run.ages.clear()
    run.took.clear()
    run.until(WARM_UP + steps)
    took = run.engines.now - began
    step = took / steps
    paused = system.pause_s * steps
    working = max(took - paused, 1e-9) * run.engines.engines
    empty_share = (run.engines.empty_s - empty) / working * (1 - paused / took)
    return SimulatedPace(
        step_s=step,
        samples_per_s=system.batch.samples / step,
        policy_idle=max(0.0, 1 - (run.busy_s - busy) / took),
        rollout_idle=min(1.0, empty_share + paused / took),
        staleness=float(np.mean(run.ages)),
        group_s=float(np.mean(run.took)),
        publish_s=system.pause_s + system.publish_s,
    )


class _Simulation:
    def __init__(
        self,
        system: System,
        policy_gpus: int,
        rollout_gpus: int,
        max_staleness: float,
        log_prob: bool,
        parts: int,
        seed: int,
    ) -> None:
        batch = system.batch
        self.system = system
        self.engines = Generation(
            system.engine, rollout_gpus // system.tp, batch.prompt_tokens, batch.lengths.cap
        )
        self.busy_s = 0.0
        self.ages: list[int] = []
        self.took: list[float] = []
        self._max_staleness = max_staleness
        whole = system.update.seconds(policy_gpus)
        if log_prob:
            whole += system.log_prob.seconds(policy_gpus)
        self._seconds_per_token = whole / batch.tokens
        self._part = -(-batch.groups // parts)
        self._rng = np.random.default_rng(seed)
        self._version = 0
        self._served = 0
        self._arriving: deque[tuple[float, int]] = deque()
        """(time, version) of published versions that engines do not serve yet."""
        self._trained = 0
        """Groups of this version that have been trained."""
        self._dispatched = 0
        self._tokens: dict[int, float] = {}
        self._born: dict[int, int] = {}
        self._leased: dict[int, float] = {}
        self._ready: list[int] = []
        self._training_ends: float | None = None
        self._in_training = 0

    def until(self, version: int) -> None:
        while self._version < version:
            self._dispatch()
            self._begin_training()
            ends = self._training_ends
            tick = self.engines.tick_s
            for until in (ends, self._arriving[0][0] if self._arriving else None):
                if until is not None:
                    tick = min(tick, until - self.engines.now)
            for when, group in self.engines.advance(tick):
                heappush(self._ready, group)
                self.took.append(when - self._leased.pop(group))
            if ends is not None and self.engines.now >= ends - 1e-9:
                self._end_training()

    def _dispatch(self) -> None:
        """Leases what admission allows."""
        batch = self.system.batch
        while self._arriving and self.engines.now >= self._arriving[0][0] - 1e-9:
            self._served = self._arriving.popleft()[1]
        limit = dispatch_limit(self._served, self._max_staleness, batch.groups)
        if (count := limit - self._dispatched) <= 0:
            return
        lengths = batch.lengths.draw(self._rng, count, batch.group_size)
        for offset, tokens in enumerate(lengths.sum(axis=1)):
            self._tokens[self._dispatched + offset] = float(tokens)
            self._born[self._dispatched + offset] = self._served
            self._leased[self._dispatched + offset] = self.engines.now
        self.engines.add(self._dispatched, lengths)
        self._dispatched = limit

    def _begin_training(self) -> None:
        wanted = min(self._part, self.system.batch.groups - self._trained)
        if self._training_ends is not None or len(self._ready) < wanted:
            return
        taken = [heappop(self._ready) for _ in range(wanted)]
        self.ages.extend(self._version - self._born.pop(group) for group in taken)
        took = self._seconds_per_token * sum(self._tokens.pop(group) for group in taken)
        self.busy_s += took
        self._in_training = wanted
        self._training_ends = self.engines.now + took

    def _end_training(self) -> None:
        self._training_ends = None
        self._trained += self._in_training
        if self._trained >= self.system.batch.groups:
            self._trained = 0
            self._version += 1
            self.engines.now += self.system.pause_s
            self._arriving.append((self.engines.now + self.system.publish_s, self._version))
