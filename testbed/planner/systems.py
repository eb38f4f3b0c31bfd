"""System of a configuration, with the times that are known of it: one, or variants that span what
is not known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import BadInput
from testbed.planner.calibration import calibrated, calibrated_by_run, from_published
from testbed.planner.lengths import SIGMA, Lengths
from testbed.planner.pace import asynchronous
from testbed.planner.system import (
    Accelerator,
    Batch,
    EngineTime,
    ModelSize,
    StageTime,
    System,
)
from testbed.planner.times import RunTimes, TimesFile, same_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.config.schema import Config
    from paceline.memory_plan import Gpu
    from paceline.model_shape import ModelShape

PUBLISH_S_PER_BILLION = 0.5
"""Seconds until engines serve new weights, per billion parameters: published runs of 7B to 72B over
NCCL took 0.4 to 0.8."""
UNKNOWN_MEAN = 0.25
"""Of the token limit: mean length of a completion if none is given."""
MOST_OF_CAP = 0.99
"""Largest mean length of a run, as a share of the token limit: no spread explains a mean at the
limit."""


@dataclass(frozen=True, slots=True)
class Calibrated:
    systems: list[System]
    basis: str
    """What the times come from, for people."""
    notes: list[str]


def active_parameters(config: Config, total: int) -> int:
    """Parameters that a token uses: fewer than all in a mixture of experts."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path, trusted = config.model.path, config.model.trust_remote_code
    stored = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    text = stored.get_text_config()
    number = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    used = getattr(text, "num_experts_per_tok", None)
    if not number or not used:
        return total
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(stored, trust_remote_code=trusted)
    experts: int = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return total - experts + int(experts * used // number)


def bare_system(
    config: Config,
    shape: ModelShape,
    active: int,
    gpu: Gpu,
    speeds: tuple[float, float],
    lengths: Lengths,
) -> System:
    """Without what is calibrated. Raises BadInput if an engine cannot hold the model."""
    tp = config.rollout.tensor_parallel
    batch = Batch(
        config.train.groups_per_step,
        config.rollout.group_size,
        config.data.max_prompt_tokens,
        lengths,
    )
    model = ModelSize(shape.parameters, active, 2.0 * shape.kv_elements)
    device = Accelerator(gpu.bytes, speeds[0] * 1e12, speeds[1] * 1e12)
    try:
        engine = EngineTime.of(model, device, tp, 0.0)
    except ValueError as error:
        raise BadInput(f"{error}: raise rollout.tensor_parallel") from error
    engine = replace(engine, most=config.rollout.max_sequences)
    publish = PUBLISH_S_PER_BILLION * shape.parameters / 1e9
    return System(batch, engine, tp, StageTime(0), StageTime(0), publish_s=publish)


def by_file(bare: System, times: TimesFile) -> Calibrated:
    batch = bare.batch
    measured = replace(
        batch,
        groups=times.groups_per_step or batch.groups,
        group_size=times.group_size or batch.group_size,
        lengths=_lengths(times.mean_tokens, batch.lengths.cap, times.sigma),
    )
    system = replace(bare, batch=measured)
    if times.weights_s is not None:
        system = replace(system, publish_s=times.weights_s)
    found = _fitted(lambda: calibrated(system, times.steps))
    planned = replace(batch, lengths=measured.lengths)
    sizes = sorted({row.gpus for row in times.measured})
    notes = _one_size_note(sizes)
    return Calibrated(
        [s.for_batch(planned) for s in found],
        f"measured synchronous steps on {_listed(sizes)} GPUs",
        notes,
    )


def by_runs(bare: System, runs: Sequence[RunTimes]) -> Calibrated:
    first = same_batch(runs)
    mean = sum(r.mean_tokens for r in runs) / len(runs)
    measured = replace(
        bare.batch,
        groups=first.groups,
        group_size=first.group_size,
        lengths=_lengths(min(mean, MOST_OF_CAP * first.cap), first.cap, None),
    )
    found = _fitted(lambda: calibrated_by_run(replace(bare, batch=measured), [r.run for r in runs]))
    notes = _one_size_note(sorted({r.run.policy_gpus for r in runs}))
    for one in runs:
        run = one.run
        pace = asynchronous(found[0], run.policy_gpus, run.rollout_gpus, run.max_staleness)
        notes.append(
            f"a step of the run with {run.policy_gpus} + {run.rollout_gpus} took {run.step_s:.3g} "
            f"s; this model says {pace.step_s:.3g} s ({pace.step_s / run.step_s - 1:+.0%})"
        )
    cap = bare.batch.lengths.cap
    planned = replace(bare.batch, lengths=_lengths(min(mean, MOST_OF_CAP * cap), cap, None))
    return Calibrated([s.for_batch(planned) for s in found], "metrics of runs", notes)


def by_published(bare: System, tflops: float, gpus: int, active: float) -> Calibrated:
    mean = bare.batch.lengths.mean
    return Calibrated(
        from_published(bare, tflops * 1e12, gpus, active),
        "published figures of other systems",
        [
            f"an order of magnitude, for completions of {mean:,.0f} tokens in the mean "
            "(--mean-tokens): nothing was measured. --times FILE or --from-run DIR gives figures "
            "of your own system"
        ],
    )


def planned_lengths(mean: float | None, cap: int) -> Lengths:
    """Raises BadInput."""
    return _lengths(UNKNOWN_MEAN * cap if mean is None else mean, cap, None)


def _lengths(mean: float, cap: int, sigma: float | None) -> Lengths:
    try:
        return Lengths.of_mean(mean, cap, SIGMA if sigma is None else sigma)
    except ValueError as error:
        raise BadInput(f"{error}: give the mean length of a completion") from error


def _fitted(fit: Callable[[], list[System]]) -> list[System]:
    try:
        return fit()
    except ValueError as error:
        raise BadInput(str(error)) from error


def _one_size_note(sizes: list[int]) -> list[str]:
    if len(sizes) > 1:
        return []
    return [
        f"training was measured on {sizes[0]} GPUs only: the interval reaches from perfect scaling "
        "to 80 % of that time for any number of GPUs. A measurement at a second size removes it"
    ]


def _listed(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes)) if len(sizes) < 3 else f"{sizes[0]} to {sizes[-1]}"
