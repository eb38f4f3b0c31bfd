"""Sections of the configuration about a run and its trainer."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.config.fields import (
    AT_START,
    OBJECTIVE,
    STEP,
    Decay,
    Fixed,
    LocalPath,
    NonNegative,
    Positive,
    Ratio,
    Section,
)
from paceline.config.objectives import with_defaults

LENGTHS = ("steps", "epochs", "max_samples")
"""Settings of [train] that say how long the run is; one of them is set."""
DEFAULT_STEPS = 100
ROW_TOKENS = 8192
"""Tokens of a row as long as no memory plan has settled them."""


class RunConfig(Section):
    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"),
        Fixed("the journal is stored under it"),
    ] = "run"
    """Name of the run. The default run directory is `runs/<name>`."""
    seed: Annotated[
        int,
        Field(ge=0, lt=1 << 63),
        Fixed("it decides the order of the data and the seeds of tasks that are under way"),
    ] = 0
    """Seed of the data order, of sampling and of initialisation."""


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    change = Fixed(OBJECTIVE)

    lr: Annotated[float, Field(gt=0), STEP] = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Annotated[Literal["constant", "linear", "cosine"], STEP] = "constant"
    """Shape of the learning rate's decay, from the end of the warm-up to the last step."""
    warmup_steps: Annotated[NonNegative, STEP] = 0
    """Steps in which the learning rate rises linearly from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1), STEP] = 0.0
    """Learning rate at the end of the decay, as a fraction of lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Betas of AdamW: decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The global gradient norm is clipped to this value. none disables clipping."""


class LossConfig(Section):
    """The policy loss: its advantages, ratios, clips and further terms."""

    change = Fixed(OBJECTIVE)

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "dr_grpo"] = "token_mean"
    """From token losses to one number. token_mean: mean over the step's tokens (DAPO).
    sequence_mean: mean over each sequence, then over sequences (GRPO). sequence_sum: sum over each,
    then the mean (RLOO). dr_grpo: sum divided by the longest completion allowed (Dr. GRPO)."""
    branches: Literal["sample", "each"] = "sample"
    """Sequences as aggregation counts them. sample: those of a sample together are one. each: an
    agent's sample counts more, the more often it has branched."""
    advantage: Literal["group", "leave_one_out", "step", "group_step"] = "group"
    """Baseline of a reward. group: the mean of its group (GRPO). leave_one_out: of the group's
    others (RLOO). step: of all samples of the step (REINFORCE++). group_step: the mean of its
    group, with the step's standard deviation (REINFORCE++-baseline)."""
    advantage_norm: bool = True
    """Divide advantages by the standard deviation of the rewards: the group's or the step's."""
    surrogate: Literal["clip", "weight"] = "clip"
    """clip: the smaller of ratio and clipped ratio times the advantage; tokens beyond the clip have
    no gradient (PPO). weight: the clipped ratio is a constant weight of the log-prob (CISPO)."""
    importance_level: Literal["token", "sequence"] = "token"
    """token: each token has its ratio. sequence: the geometric mean over the completion (GSPO)."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """Lower clip range: the importance ratio is clipped to at least 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper clip range: the importance ratio is clipped to at most 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """With a negative advantage, the ratio counts at most this much. none disables it."""
    proximal: Literal["behaviour", "trainer", "interpolated"] = "behaviour"
    """Denominator of the importance ratio. behaviour: the policy that sampled (PPO). trainer: the
    trainer's policy before the step, with a weight towards the behaviour policy (decoupled PPO).
    interpolated: a mixture in log space, by staleness."""
    tis_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Truncated importance sampling: cap of the per-token weight trainer/behaviour, in the policy's
    term with proximal = trainer or interpolated, and in the KL term always. none disables it."""
    mask_ratio_token: tuple[Ratio, Ratio] | None = None
    """Range [low, high]: tokens whose ratio trainer/behaviour is outside it have no loss."""
    mask_ratio_sequence: tuple[Ratio, Ratio] | None = None
    """The same for whole sequences, by the geometric mean of their ratios."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term. Above 0, the trainer loads the reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term in the loss, named as by Schulman."""
    kl_in: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss. reward: each token's advantage is lowered by kl_coef times the
    log-ratios to the reference from this token on."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the bonus for the policy's mean entropy at the trained tokens, in nats."""
    router_aux_loss_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the load-balancing loss of a mixture of experts. 0: none; 0.001 is common."""
    overlong_filter: bool = False
    """Completions cut at the length limit give no gradient, but count in the advantages (DAPO)."""
    reference: Annotated[str, Field(pattern=r"^(model|scorer:\w+)$")] = "model"
    """Reference of the KL term. model: the trainer loads reference_path. scorer:NAME: a scorer of
    kind logprobs, and no trainer holds it."""
    reference_path: LocalPath | None = None
    """Directory or hub name of the reference model. Default: model.path."""
    skip_zero_advantage: bool = True
    """Skip sequences of zero advantage, if there is no KL term. The gradient is the same; entropy,
    ratio and log-prob gap are measured over the others."""

    @field_validator("mask_ratio_token", "mask_ratio_sequence")
    @classmethod
    def _ordered(
        cls, bounds: tuple[float, float] | None, info: ValidationInfo
    ) -> tuple[float, float] | None:
        if bounds is not None and bounds[0] > bounds[1]:
            raise ValueError(
                f"train.loss.{info.field_name} = {list(bounds)}: the lower bound is above the "
                "upper one, so it holds no number"
            )
        return bounds


class MemoryConfig(Section):
    """Memory of the trainer: size of a row, slices of ranks, and what is kept on the host."""

    reshard_after_forward: bool = True
    """true: blocks gather their weights again in the backward pass (ZeRO-3). false: gathered
    weights are kept (ZeRO-2), which costs the memory of the whole model and saves half of the
    gathering."""
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory: 8 bytes a parameter less on the device, 16 more over the
    bus in a step."""
    offload_frozen: bool = False
    """Keep frozen models, such as the reference, in host memory but for the block that computes."""
    offload_activations: bool = False
    """Keep what the forward pass saves in host memory. It needs model.gradient_checkpointing: 2
    bytes in bfloat16, 4 in float32, for each token, block and hidden dimension."""
    offload_publishing: bool = False
    """Keep the weights that rollout workers fetch in host memory: two copies in the engine's type,
    divided by the ranks of the replica."""
    tokens_per_microbatch: Positive | Literal["auto"] = "auto"
    """Tokens of a micro-batch, packed without padding; it bounds the memory. A shared prompt counts
    once for each completion. auto: 8192; on CUDA up to 32768, as many as the memory plan has room
    for."""

    @property
    def row_tokens(self) -> int:
        """tokens_per_microbatch as a number."""
        chosen = self.tokens_per_microbatch
        return ROW_TOKENS if chosen == "auto" else chosen


class TrainConfig(Section):
    change = STEP

    algorithm: Annotated[str, Fixed(OBJECTIVE)] = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce++ or reinforce++-baseline, which give other
    defaults to the settings below; ppo, dpo, ipo, orpo, kto, online_dpo, reward_model, distill,
    sft; or package.module:Class. Options are in [objective]; see docs/algorithms.md."""
    steps: Positive | None = None
    """Optimizer steps of the run: 100 if neither epochs nor max_samples is set."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length in passes over the training data, instead of steps, rounded up to whole steps."""
    max_samples: Positive | None = None
    """Length of the run in samples (completions), instead of steps. The steps are rounded down."""
    groups_per_step: Annotated[
        Positive, Fixed("steps that a rollback repeats have this many groups")
    ] = 32
    """Global batch size in groups, independent of the replicas. A group is a prompt's
    completions."""
    max_staleness: NonNegative = 1
    """Steps by which generation may be ahead of training when a prompt is handed out. 0:
    synchronous. For a group that takes longer than expected, see late_groups."""
    late_groups: Literal["train", "drop"] = "train"
    """Groups older than max_staleness when they are trained. train: with their importance weights.
    drop: others take their place, which leaves out long answers and slow environments."""
    max_token_age: NonNegative | None = None
    """Oldest token that late_groups = train trains, in steps; older ones are masked, and a group of
    such tokens only is dropped. Default: 8 x max_staleness, at least 8."""
    max_nonfinite_steps: Annotated[
        Positive | None, Fixed("the ledger counts steps without a finite gradient by it")
    ] = 10
    """The run fails after this many steps in a row without a finite gradient, which change no
    weight. none: no limit."""
    filter_uninformative: Annotated[bool, Fixed(OBJECTIVE)] = False
    """Drop groups whose rewards are all equal, and generate others instead."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints. Rollout payloads are kept until a checkpoint covers them."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints that are kept, beside the one with the highest held-out reward."""
    export_every: Annotated[NonNegative, AT_START] = 0
    """Every so many checkpoints, one is exported to `<run_dir>/exports/step-<step>` as a Hugging
    Face directory, while the run goes on. 0: only the last one, at its end."""
    eval_every: Positive = 50
    """Steps between evaluations on the held-out data, beside those at step 0 and at the end."""
    eval_limit: Positive = 256
    """Largest number of held-out prompts in an evaluation."""
    early_stop_evals: NonNegative = 0
    """Stop after this many evaluations in a row without a new best held-out reward. 0: never."""
    eval_drop: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction below the best held-out reward at which the run warns. 0: never."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        given = [name for name in LENGTHS if settings.get(name) not in (None, "none")]
        if len(given) > 1:
            raise ValueError(
                f"train.{given[0]} and train.{given[1]} are both set, and each is the length of "
                'the run: keep one, and set the other to "none"'
            )
        # Defaults of the algorithm's name, which a setting of the user's own goes before.
        return with_defaults(settings if given else {**settings, "steps": DEFAULT_STEPS})

    @property
    def token_age(self) -> int:
        """max_token_age, or its default."""
        if self.max_token_age is not None:
            return self.max_token_age
        return max(8, 8 * self.max_staleness)

    @model_validator(mode="after")
    def _admitted_tokens_count(self) -> "TrainConfig":
        if self.max_token_age is not None and self.max_token_age < self.max_staleness:
            raise ValueError(
                f"train.max_token_age = {self.max_token_age} masks tokens that train.max_staleness "
                f"= {self.max_staleness} allows: set it to at least {self.max_staleness}"
            )
        return self
