"""Sections of the configuration about training: run, model, data, rewards and the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from paceline.config.fields import Decay, LocalPath, NonNegative, Positive, Ratio, Seconds, Section

NEED_ANSWERS = ("exact_match", "math_verify")
"""Built-in rewards that compare with the row's answer."""


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "run"
    """Name of the run. The default run directory is `runs/<name>`."""
    seed: NonNegative = 0
    """Seed of the data order, of sampling and of initialisation."""


class ModelConfig(Section):
    path: LocalPath
    """The model to train: a directory or hub name that `AutoModelForCausalLM.from_pretrained`
    accepts."""
    initial_checkpoint: LocalPath | None = None
    """Checkpoint directory of another run, with whose weights this run begins; its optimizer state is
    taken over if it fits. `paceline up --from` sets it. If none, the run begins with model.path."""
    tokenizer: LocalPath | None = None
    """Directory or hub name of the tokenizer. Default: `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the trainer computes. Master weights and optimizer state are always
    float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. It needs less memory and about a third more
    compute."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of policy and rollout workers. auto uses cuda if torch finds a GPU."""


class DataConfig(Section):
    path: LocalPath
    """Training data: a JSONL or Parquet file, a directory of such files, or the name or directory
    of a Hugging Face data set."""
    open_timeout_s: Seconds = 1800.0
    """Longest time to open the data. After it the controller ends with an error that names the data."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    prompt_field: str = "prompt"
    """Field with the prompt: text, or a list of chat messages for the tokenizer's chat template."""
    answer_field: str | None = "answer"
    """Field that is passed to rewards as the reference answer. If none, rewards receive only the
    row."""
    chat: bool = False
    """Wrap a text prompt as one user message and apply the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message put before the chat messages, unless the row has its own."""
    shuffle: bool = True
    """Shuffle the rows in each pass over the data, by run.seed. If false, rows keep the order of
    the file."""
    max_prompt_tokens: Positive = 4096
    """Longest prompt, in tokens. Longer prompts are dropped, with a reason."""
    eval_path: LocalPath | None = None
    """Held-out data, in any form that data.path accepts. If none, the run has no evaluations."""
    eval_split: str = "test"
    """Split of a held-out Hugging Face data set."""


class RewardConfig(Section):
    functions: list[str] | dict[str, float] = Field(default_factory=lambda: ["exact_match"])
    """Rewards: built-in names (exact_match, math_verify, format:REGEX) or
    package.module:function. As a table, each has a weight."""
    timeout_s: Seconds = 10.0
    """Time limit of one reward call, in seconds. The attempt fails if a call exceeds it."""
    processes: NonNegative = 1
    """Processes that score completions, per rollout worker. 0 scores in the worker itself,
    without a time limit."""


class TrainConfig(Section):
    algorithm: Literal["grpo"] = "grpo"
    """The policy-gradient algorithm."""
    steps: Positive = 100
    """Optimizer steps of the run."""
    groups_per_step: Positive = 32
    """Global batch size in groups, independent of the number of replicas. A group is the
    completions of one prompt."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's decay, from the end of the warm-up to the last step."""
    warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of the decay, as a fraction of lr. The step after the last one would
    have it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Betas of AdamW: decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The global gradient norm is clipped to this value. none disables clipping."""
    max_staleness: NonNegative = 1
    """How far generation may be ahead of training, in steps: a prompt is handed out only if its
    group could be trained at most this many steps after the weights that begin it. 0 makes the run
    synchronous. A group that takes longer than expected is late: see late_groups."""
    late_groups: Literal["train", "drop"] = "train"
    """Groups that are older than max_staleness when they are trained, because they took long.
    train: they are trained, with their importance weights. drop: they are dropped, and other
    prompts take their place. That leaves out long answers and slow environments."""
    max_token_age: NonNegative | None = None
    """Oldest token that late_groups = "train" trains, in steps. Older tokens are masked in the
    loss, and a group without a younger one is dropped as expired. Default: 8 x max_staleness, at
    least 8."""
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """How token losses become one number. token_mean: mean over all tokens of the step (DAPO).
    sequence_mean: mean over each sequence, then over sequences (GRPO). dr_grpo: sum divided by the
    longest completion, which is rollout.max_tokens, or with an environment rollout.max_context
    (Dr. GRPO)."""
    advantage_norm: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """Lower clip range: the importance ratio is clipped to at least 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper clip range: the importance ratio is clipped to at most 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: with a negative advantage, the importance ratio counts at most this much. none
    disables it."""
    proximal: Literal["behaviour", "trainer", "interpolated"] = "behaviour"
    """Policy in the denominator of the importance ratio. behaviour: the policy that sampled
    (PPO). trainer: the trainer's policy before the step, with an importance weight towards the
    behaviour policy (decoupled PPO). interpolated: a mixture of the two in log space, weighted by
    staleness."""
    tis_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Truncated importance sampling: cap of the per-token weight trainer/behaviour. none disables
    truncation. In the policy's term it applies with proximal = trainer or interpolated; with behaviour
    the ratio itself has this weight. The weight of the KL term has this cap with every proximal."""
    mask_ratio_token: tuple[Ratio, Ratio] | None = None
    """Range [low, high]. Tokens whose ratio trainer/behaviour is outside it are excluded from the
    loss. none disables it."""
    mask_ratio_sequence: tuple[Ratio, Ratio] | None = None
    """Range [low, high] for whole sequences, by the geometric mean of their token ratios. none
    disables it."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the reference model. Above 0, the trainer loads the reference
    model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term, named as by Schulman."""
    reference_path: LocalPath | None = None
    """Directory or hub name of the reference model. Default: model.path."""
    tokens_per_microbatch: Positive = 8192
    """Tokens of a micro-batch, to which sequences are packed without padding. A shared prompt counts
    once for each completion that attends to it, so this number bounds the memory."""
    max_nonfinite_steps: Positive | None = 10
    """The run fails after this many steps in a row whose gradient is not finite. Such a step changes
    no weight. none disables the limit."""
    filter_uninformative: bool = False
    """Drop groups whose rewards are all equal, which have zero advantage, and generate others
    instead."""
    skip_zero_advantage: bool = True
    """Skip sequences that cannot contribute to the gradient: those with zero advantage, if there
    is no KL term. The gradient is the same; entropy, ratio, effective sample size and log-prob gap
    are then measured over the other sequences."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints. Rollout payloads are kept until a checkpoint covers them."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints kept on disk. The checkpoint with the highest held-out reward
    is kept as well."""
    eval_every: Positive = 50
    """Steps between evaluations on the held-out data. The run also evaluates at step 0 and at the
    end."""
    eval_limit: Positive = 256
    """Largest number of held-out prompts in an evaluation."""
    early_stop_evals: NonNegative = 0
    """Stop the run after this many evaluations in a row without a new best held-out reward. 0: it
    goes on to the last step."""
    eval_drop: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the best held-out reward by which a later one must be lower for the run to warn.
    0 disables the warning."""

    @property
    def token_age(self) -> int:
        """max_token_age, or its default."""
        if self.max_token_age is not None:
            return self.max_token_age
        return max(8, 8 * self.max_staleness)

    @model_validator(mode="after")
    def _admitted_tokens_count(self) -> TrainConfig:
        if self.max_token_age is not None and self.max_token_age < self.max_staleness:
            raise ValueError(
                f"train.max_token_age = {self.max_token_age} masks tokens that train.max_staleness "
                f"= {self.max_staleness} allows: set it to at least {self.max_staleness}"
            )
        return self

    @field_validator("mask_ratio_token", "mask_ratio_sequence")
    @classmethod
    def _ordered(
        cls, bounds: tuple[float, float] | None, info: ValidationInfo
    ) -> tuple[float, float] | None:
        if bounds is not None and bounds[0] > bounds[1]:
            raise ValueError(
                f"train.{info.field_name} = {list(bounds)}: the lower bound is above the upper one, "
                "so every token would be masked"
            )
        return bounds
