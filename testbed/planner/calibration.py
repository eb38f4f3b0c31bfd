"""Calibration of a system from measured parts of synchronous steps, or from published figures as a
set of variants.

Only one figure of an engine is fitted: its seconds per token beyond reading weights. If a stage was
measured at one number of GPUs, the share of it that more GPUs do not divide is unknown: the
variants span what published runs have.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from testbed.planner.pace import asynchronous, generation_seconds
from testbed.planner.system import EngineTime, StageTime, System

CONSTANT_SHARES = (0.0, 0.8)
"""Of a training stage: the part that no further GPU divides, at the size it was measured. From
perfect scaling to the share of a 7B model on 128 GPUs with fixed mini-batches (verl, fully
asynchronous recipe)."""
OVERHEADS_S = (0.0036, 0.0136)
"""Of an engine's token, beyond reading the weights: from the fits to a 7B model on H20 (verl) and a
32B model on H800 (DORA)."""
MFU = (0.12, 0.38)
"""Of training a dense model: 32B on 64 H800 (DORA), 7B on 32 H20 (verl)."""
TRAINING_FLOPS, FORWARD_FLOPS = 6, 2
"""Operations per active parameter and token."""
FIT_BATCHES = 4
_HALVINGS = 12


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Parts of a synchronous step that used all of ``gpus`` GPUs for each, in seconds."""

    gpus: int
    generation_s: float
    update_s: float
    log_prob_s: float = 0.0
    step_s: float | None = None
    """The whole; what its parts leave is counted once a step. None: nothing is left."""


def calibrated(system: System, rows: Sequence[MeasuredStep]) -> list[System]:
    """``system`` with the times of the rows: one, or several if the rows leave open how training
    scales. Its engine's ``fixed`` must be without overhead."""
    rests = [
        max(0.0, row.step_s - row.generation_s - row.log_prob_s - row.update_s)
        for row in rows
        if row.step_s is not None
    ]
    fitted = replace(
        system,
        update=StageTime.fit([(row.gpus, row.update_s) for row in rows]),
        log_prob=StageTime.fit([(row.gpus, row.log_prob_s) for row in rows]),
        rest_s=sum(rests) / len(rests) if rests else 0.0,
    )
    fitted = replace(fitted, engine=_engine_of(fitted, rows))
    sizes = {row.gpus for row in rows}
    return [fitted] if len(sizes) > 1 else scalings(fitted, sizes.pop())


def scalings(system: System, gpus: int) -> list[System]:
    """Variants in which different shares of training do not scale beyond ``gpus`` GPUs."""
    return [
        replace(
            system,
            update=system.update.with_constant_share(share, gpus),
            log_prob=system.log_prob.with_constant_share(share, gpus),
        )
        for share in CONSTANT_SHARES
    ]


def _engine_of(system: System, rows: Sequence[MeasuredStep]) -> EngineTime:
    """The engine whose generation times are nearest to the measured ones, by the mean of their
    logarithms."""

    def error(engine: EngineTime) -> float:
        tried = replace(system, engine=engine)
        return sum(
            math.log(generation_seconds(tried, row.gpus, FIT_BATCHES) / row.generation_s)
            for row in rows
        )

    return with_fitted_overhead(system.engine, error)


def with_fitted_overhead(engine: EngineTime, error: Callable[[EngineTime], float]) -> EngineTime:
    """The overhead at which ``error``, which rises with it, is 0; none if it is positive without
    overhead."""
    if error(engine) >= 0:
        return engine
    low, high = 0.0, engine.fixed
    while error(engine.with_overhead(high)) < 0:
        low, high = high, 2 * high
        if high > 100:
            raise ValueError(
                "no time per token explains the measured generation: are the lengths those of that "
                "run?"
            )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if error(engine.with_overhead(middle)) < 0:
            low = middle
        else:
            high = middle
    return engine.with_overhead((low + high) / 2)


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Means of a run of one's own."""

    policy_gpus: int
    rollout_gpus: int
    max_staleness: int
    generate_s: float
    """From the lease of a group to its last token."""
    update_s: float
    """Gradients, reduction and commit of a step."""
    publish_s: float
    step_s: float


def calibrated_by_run(system: System, runs: Sequence[MeasuredRun]) -> list[System]:
    """As ``calibrated``, from asynchronous runs: the engine is the one whose groups take as long as
    theirs."""
    fitted = replace(
        system,
        update=StageTime.fit([(run.policy_gpus, run.update_s) for run in runs]),
        publish_s=sum(run.publish_s for run in runs) / len(runs),
    )

    def error(engine: EngineTime) -> float:
        tried = replace(fitted, engine=engine)
        return sum(math.log(_group_seconds(tried, run) / run.generate_s) for run in runs)

    fitted = replace(fitted, engine=with_fitted_overhead(system.engine, error))
    sizes = {run.policy_gpus for run in runs}
    return [fitted] if len(sizes) > 1 else scalings(fitted, sizes.pop())


def _group_seconds(system: System, run: MeasuredRun) -> float:
    pace = asynchronous(
        system, run.policy_gpus, run.rollout_gpus, run.max_staleness, steps=FIT_BATCHES
    )
    return pace.group_s


def from_published(system: System, flops: float, gpus: int, active: float) -> list[System]:
    """Variants that span the published figures. ``flops``: of one GPU; ``active``: parameters a
    token uses. The engine's ``fixed`` must be without overhead. The result is an order of
    magnitude."""
    tokens = system.batch.tokens + system.batch.samples * system.batch.prompt_tokens
    found = []
    for overhead in OVERHEADS_S:
        engine = system.engine.with_overhead(overhead)
        for mfu in MFU:
            rate = flops * mfu
            both = replace(
                system,
                engine=engine,
                update=StageTime(TRAINING_FLOPS * active * tokens / rate),
                log_prob=StageTime(FORWARD_FLOPS * active * tokens / rate),
            )
            found.extend(scalings(both, gpus))
    return found
