"""Published runs: what a system measured synchronously, and how much faster it was asynchronously.

A system is calibrated from its synchronous rows alone; its asynchronous rows are only compared.
Where a figure is not published and had to be assumed, a comment says so: lengths' spread, GPUs of
an engine, pauses for weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from testbed.planner.calibration import MeasuredStep
from testbed.planner.lengths import Lengths
from testbed.planner.system import (
    Accelerator,
    Batch,
    EngineTime,
    ModelSize,
    StageTime,
    System,
)

H20 = Accelerator(96e9, 4.0e12, 148e12)
GB200 = Accelerator(186e9, 8e12, 2_450e12)
H100 = Accelerator(80e9, 3.35e12, 989e12)
"""An H800 has the same memory, bandwidth and arithmetic; its links between GPUs are slower."""


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """One published asynchronous row."""

    name: str
    policy_gpus: int
    rollout_gpus: int
    max_staleness: float
    published: float
    """Synchronous step time divided by the asynchronous one."""
    updates_per_version: int = 1
    synchronous_log_prob: bool = True
    """The synchronous run recomputes behaviour log-probs."""
    asynchronous_log_prob: bool = False
    against_staleness: float | None = None
    """The row's ratio is to a disaggregated run of this staleness, not to a synchronous one."""
    control: bool = False
    """A case in which asynchrony gains little or nothing. Only the sign of the gain counts."""


@dataclass(frozen=True, slots=True)
class PublishedSystem:
    name: str
    source: str
    batch: Batch
    model: ModelSize
    gpu: Accelerator
    tp: int
    pause_s: float
    rows: tuple[MeasuredStep, ...]
    asynchronous: tuple[Asynchronous, ...]
    assumed: str
    like: str | None = None
    """Name of the system whose training scales in the same way, if this one has a single
    synchronous row."""
    breakdown: bool = True
    """The parts of the synchronous step are published."""

    @property
    def bare(self) -> System:
        """Without what is calibrated."""
        engine = EngineTime.of(self.model, self.gpu, self.tp, 0.0)
        return System(self.batch, engine, self.tp, StageTime(0), StageTime(0), self.pause_s)


def _even(shares: float, row: tuple[int, float]) -> MeasuredStep:
    """A step of which only the whole is published."""
    gpus, step = row
    return MeasuredStep(gpus, generation_s=step * shares, update_s=step * (1 - shares))


QWEN_7B = ModelSize(7.6e9, 7.6e9, 57_344)
QWEN_32B = ModelSize(32.5e9, 32.5e9, 262_144)
VERL_7B_BATCH = Batch(512, 16, 200, Lengths(450, 1.1, 28_672))

VERL_7B = PublishedSystem(
    name="verl 7B",
    source="verl, docs/advance/fully_async.md, first 200 steps",
    batch=VERL_7B_BATCH,
    model=QWEN_7B,
    gpu=H20,
    tp=4,
    pause_s=5.0,
    # Means over 400 steps, scaled to the first 200 by the hours of either: lengths grew in one run,
    # not in the other.
    rows=(
        MeasuredStep(32, 225.7, 170.4, 68.0, 499.0),
        MeasuredStep(64, 154.1, 136.4, 71.8, 373.5),
        MeasuredStep(128, 161.1, 103.1, 48.9, 322.8),
    ),
    asynchronous=(
        Asynchronous("16 policy, 16 rollout, staleness 0.5", 16, 16, 0.5, 1.70, 4),
        Asynchronous("32 policy, 32 rollout, staleness 0.5", 32, 32, 0.5, 2.03, 4),
        Asynchronous("64 policy, 64 rollout, staleness 0.5", 64, 64, 0.5, 2.65, 4),
        Asynchronous("64 policy, 64 rollout, staleness 0", 64, 64, 0.0, 1.85, 4),
        Asynchronous("64 policy, 64 rollout, staleness 0.1", 64, 64, 0.1, 2.08, 4),
        Asynchronous("64 policy, 64 rollout, staleness 0.3", 64, 64, 0.3, 2.63, 4),
    ),
    assumed="lengths (median 450 tokens, sigma 1.1), prompts of 200 tokens, 5 s for weights",
)
DORA = PublishedSystem(
    name="DORA 32B",
    source="arXiv 2604.26256, section 4.2",
    batch=Batch(512, 16, 200, Lengths(1_100, 1.28, 30_720)),
    model=QWEN_32B,
    gpu=H100,
    tp=4,
    pause_s=5.0,
    rows=(
        MeasuredStep(64, 894.0, 480.0, 0.0, 1_374.0),
        MeasuredStep(128, 882.0, 324.0, 0.0, 1_206.0),
    ),
    asynchronous=(
        Asynchronous("32 policy, 32 rollout, staleness 1", 32, 32, 1, 1.56, 16),
        Asynchronous("64 policy, 64 rollout, staleness 1", 64, 64, 1, 1.93, 16),
    ),
    assumed="lengths' spread (sigma 1.28 fits mean and maximum), 4 GPUs an engine, an even split: it shares GPUs instead",
)
VERL_30B = PublishedSystem(
    name="verl 30B-A3B",
    source="verl, docs/advance/fully_async.md",
    batch=Batch(512, 16, 200, Lengths(900, 1.1, 8_192)),
    model=ModelSize(30.5e9, 3.3e9, 98_304),
    gpu=H20,
    tp=4,
    pause_s=5.0,
    # Log-probs of the reference stay in the asynchronous run: counted as part of the update.
    rows=(MeasuredStep(128, 348.1, 86.3 + 20.9, 28.7, 497.9),),
    asynchronous=(Asynchronous("32 policy, 96 rollout, staleness 0.5", 32, 96, 0.5, 1.76, 4),),
    assumed="lengths (median 900 tokens, sigma 1.1), 4 GPUs an engine, 5 s for weights",
)
ONE_STEP_OFF = PublishedSystem(
    name="verl 7B one-step-off",
    source="verl, docs/advance/one_step_off.md, FSDP2",
    batch=replace(VERL_7B_BATCH, lengths=Lengths(450, 1.1, 20_480)),
    model=QWEN_7B,
    gpu=H20,
    tp=4,
    pause_s=5.0,
    rows=(MeasuredStep(16, 321.0, 286.0, 88.0, 749.0),),
    asynchronous=(
        Asynchronous(
            "12 policy, 4 rollout, staleness 1",
            12,
            4,
            1,
            1.44,
            asynchronous_log_prob=True,
            control=True,
        ),
    ),
    assumed="training scales as in verl 7B; lengths as there",
    like="verl 7B",
)
ONE_STEP_OFF_MEGATRON = replace(
    ONE_STEP_OFF,
    name="verl 7B one-step-off, Megatron",
    source="verl, docs/advance/one_step_off.md, Megatron: by its steps (its hours give 1.40)",
    batch=replace(VERL_7B_BATCH, lengths=Lengths(450, 1.1, 8_192)),
    rows=(MeasuredStep(16, 207.0, 344.0, 119.0, 699.0),),
    asynchronous=(replace(ONE_STEP_OFF.asynchronous[0], published=1.235),),
)
MARIN = PublishedSystem(
    name="marin",
    source="marin, issue 8936: 20 updates, asynchronous was slower by 68 s",
    batch=Batch(16, 1, 1, Lengths(100, 0.0, 101)),
    model=QWEN_7B,
    gpu=H100,
    tp=1,
    # 20 updates: weights took 147.4 s asynchronously and 48.8 s synchronously, generation 35.9 s.
    pause_s=147.4 / 20,
    rows=(
        MeasuredStep(2, 35.9 / 20, 10.0, 0.0, 10.0 + (35.9 + 48.8) / 20),
        MeasuredStep(4, 35.9 / 20, 10.0, 0.0, 10.0 + (35.9 + 48.8) / 20),
    ),
    asynchronous=(
        Asynchronous(
            "1 policy, 1 rollout, staleness 1", 1, 1, 1, 14.235 / (14.235 + 68 / 20), control=True
        ),
    ),
    assumed="an update of 10 s (not published), which leaves the difference as it is: generation is hidden, its "
    "weights cost more",
)
_NEMO_V3 = ModelSize(671e9, 37e9, 70_272)
NEMO_V3 = PublishedSystem(
    name="NeMo RL DeepSeek-V3",
    source="NeMo RL, performance summary v0.6, H100",
    batch=Batch(16, 32, 200, Lengths.of_mean(701, 1_536, 0.8)),
    model=_NEMO_V3,
    gpu=H100,
    tp=32,
    pause_s=10.0,
    rows=(_even(0.5, (256, 134.0)), _even(0.5, (512, 111.0))),
    asynchronous=(Asynchronous("256 policy, 256 rollout, staleness 1", 256, 256, 1, 1.73),),
    assumed="half of a step is generation, 32 GPUs an engine, 10 s for weights",
    breakdown=False,
)
NEMO_V3_GB200 = replace(
    NEMO_V3,
    name="NeMo RL DeepSeek-V3, GB200",
    source="NeMo RL, performance summary v0.6, GB200",
    gpu=GB200,
    tp=16,
    rows=(_even(0.5, (128, 108.0)), _even(0.5, (256, 98.7))),
    asynchronous=(Asynchronous("128 policy, 128 rollout, staleness 1", 128, 128, 1, 1.60),),
    assumed="half of a step is generation, 16 GPUs an engine, 10 s for weights",
)
NEMO_235B = PublishedSystem(
    name="NeMo RL Qwen3-235B",
    source="NeMo RL, performance summary v0.6, H100",
    batch=Batch(16, 32, 200, Lengths.of_mean(5_698, 8_192, 0.8)),
    model=ModelSize(235e9, 22e9, 192_512),
    gpu=H100,
    tp=16,
    pause_s=10.0,
    rows=(_even(0.5, (128, 395.0)), _even(0.5, (256, 312.0))),
    asynchronous=(Asynchronous("128 policy, 128 rollout, staleness 1", 128, 128, 1, 1.35),),
    assumed="half of a step is generation, 16 GPUs an engine, 10 s for weights",
    breakdown=False,
)
NEMO_235B_GB200 = replace(
    NEMO_235B,
    name="NeMo RL Qwen3-235B, GB200",
    source="NeMo RL, performance summary v0.6, GB200",
    gpu=GB200,
    tp=8,
    rows=(_even(0.5, (64, 286.0)), _even(0.5, (128, 345.0))),
    asynchronous=(Asynchronous("64 policy, 64 rollout, staleness 1", 64, 64, 1, 1.24),),
    assumed="half of a step is generation, 8 GPUs an engine, 10 s for weights; its layout changes with the number of GPUs",
)
NEMO_30B_GB200 = PublishedSystem(
    name="NeMo RL Qwen3-30B-A3B, GB200",
    source="NeMo RL, performance summary v0.6, GB200: asynchronous was slower",
    batch=Batch(64, 32, 200, Lengths.of_mean(3_203, 4_096, 0.8)),
    model=ModelSize(30.5e9, 3.3e9, 98_304),
    gpu=GB200,
    tp=2,
    pause_s=5.0,
    rows=(_even(0.5, (16, 221.0)),),
    asynchronous=(Asynchronous("8 policy, 8 rollout, staleness 1", 8, 8, 1, 0.73),),
    assumed="half of a step is generation, 2 GPUs an engine, 5 s for weights",
    breakdown=False,
)
NEMO_30B = replace(
    NEMO_30B_GB200,
    name="NeMo RL Qwen3-30B-A3B",
    source="NeMo RL, performance summary v0.6, H100",
    gpu=H100,
    rows=(_even(0.5, (32, 192.0)),),
    asynchronous=(Asynchronous("16 policy, 16 rollout, staleness 1", 16, 16, 1, 1.26),),
)
AREAL = PublishedSystem(
    name="AReaL 1.5B",
    source="arXiv 2505.24298, figure 5c, against its own staleness 0",
    batch=Batch(512, 16, 200, Lengths(7_150, 0.8, 27_648)),
    model=ModelSize(1.54e9, 1.54e9, 28_672),
    gpu=H100,
    tp=1,
    pause_s=2.0,
    rows=(),
    asynchronous=tuple(
        Asynchronous(
            f"32 policy, 96 rollout, staleness {eta}",
            32,
            96,
            eta,
            published,
            against_staleness=0,
            synchronous_log_prob=False,
        )
        for eta, published in ((1, 2.09), (2, 2.77), (4, 2.77), (8, 2.89), (16, 3.08))
    ),
    assumed="all times: nothing but lengths is its own",
)
_AREAL_SIZES = {
    "1.5B": (AREAL.model, 1, 128, 2.77),
    "7B": (QWEN_7B, 1, 192, 2.27),
    "14B": (ModelSize(14.8e9, 14.8e9, 196_608), 2, 256, 2.23),
    "32B": (QWEN_32B, 4, 384, 1.64),
}
"""Model, GPUs of an engine, GPUs of the run, ratio to its own synchronous hours."""
AREAL_HOURS = tuple(
    replace(
        AREAL,
        name=f"AReaL {size}, whole run",
        source="arXiv 2505.24298, table 1: hours of its own synchronous and asynchronous runs",
        model=model,
        tp=tp,
        asynchronous=(
            Asynchronous(
                f"{gpus // 4} policy, {3 * gpus // 4} rollout, staleness 4",
                gpus // 4,
                3 * gpus // 4,
                4,
                published,
                synchronous_log_prob=False,
            ),
        ),
        assumed="all times, staleness 4, and lengths as those of the 1.5B model: 14B and 32B trained on code",
    )
    for size, (model, tp, gpus, published) in _AREAL_SIZES.items()
)
PIPELINE_RL = PublishedSystem(
    name="PipelineRL 7B",
    source="PipelineRL, submission version",
    batch=Batch(64, 16, 200, Lengths(1_100, 0.8, 8_192)),
    model=QWEN_7B,
    gpu=H100,
    tp=1,
    pause_s=1.0,
    rows=(),
    asynchronous=(Asynchronous("16 policy, 16 rollout, staleness 8", 16, 16, 8, 2.0),),
    assumed="all times: nothing but lengths is its own",
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows of one kind of evidence."""

    name: str
    systems: Sequence[PublishedSystem] = field(default_factory=tuple)


KINDS = (
    Kind("parts of a step at two or more sizes", (VERL_7B, DORA)),
    Kind("controls", (ONE_STEP_OFF, ONE_STEP_OFF_MEGATRON, MARIN)),
    Kind("parts of a step at one size", (VERL_30B,)),
    Kind(
        "whole steps only",
        (NEMO_V3, NEMO_V3_GB200, NEMO_235B, NEMO_235B_GB200, NEMO_30B, NEMO_30B_GB200),
    ),
    Kind("nothing of its own", (AREAL, *AREAL_HOURS, PIPELINE_RL)),
)
