"""Sections of the configuration about training: run, model, data, rewards and the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from paceline.config.fields import (
    AT_START,
    LEASE,
    NEWER,
    OBJECTIVE,
    STEP,
    Decay,
    Fixed,
    LocalPath,
    NonNegative,
    Positive,
    Ratio,
    RowForm,
    Seconds,
    Section,
)
from paceline.config.objectives import with_defaults
from paceline.config.prompt_template import placeholders

LENGTHS = ("steps", "epochs", "max_samples")
"""Settings of [train] that say how long the run is; one of them is set."""
DEFAULT_STEPS = 100
SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"
TEMPLATE_ARGS = (
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
)
"""Arguments of apply_chat_template that a run sets itself."""


BUILT_IN_REWARDS: Mapping[str, str] = {
    "exact_match": "exact_match",
    "math_verify": "math_verify",
    "math_boxed": "math_boxed",
    "math_boxed:intervals": "math_boxed_intervals",
}
"""Rewards that are built in, beside format:REGEX, all of which compare with the row's answer: name
in
the configuration, and name of the function among the rewards of the rollout worker."""


class RunConfig(Section):
    name: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"),
        Fixed("the journal is stored under it"),
    ] = "run"
    """Name of the run. The default run directory is `runs/<name>`."""
    seed: Annotated[
        NonNegative,
        Fixed("it decides the order of the data and the seeds of tasks that are under way"),
    ] = 0
    """Seed of the data order, of sampling and of initialisation."""


class ModelConfig(Section):
    change = Fixed("checkpoints hold this model and its optimizer state")

    path: LocalPath
    """The model to train: a directory or hub name that `AutoModelForCausalLM.from_pretrained`
    accepts."""
    initial_checkpoint: Annotated[LocalPath | None, Fixed("the run has begun with it")] = None
    """Checkpoint directory of another run, with whose weights this run begins; its optimizer state
    is taken over if it fits. `paceline up --from` sets it. If none, the run begins with model.path.
    """
    tokenizer: Annotated[
        LocalPath | None, Fixed("groups in flight are token ids of this tokenizer")
    ] = None
    """Directory or hub name of the tokenizer. Default: `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the trainer computes. Master weights and optimizer state are always
    float32."""
    gradient_checkpointing: Annotated[bool, AT_START] = False
    """Recompute activations in the backward pass. It needs less memory and about a third more
    compute."""
    attention: Annotated[Literal["sdpa", "flex"], AT_START] = "sdpa"
    """Attention of the trainer over packed rows. sdpa: PyTorch's scaled dot-product attention, for
    which a shared prompt is copied once for each completion. flex: a compiled block-sparse kernel
    without copies, for GPUs and long shared prompts; on a CPU it computes all scores of a row, and
    is for checks only.
    """
    compile: Annotated[bool, AT_START] = False
    """Compile each transformer block of the trainer with torch.compile, around its attention. The
    first row takes longer."""
    trust_remote_code: Annotated[bool, Fixed("the model's code belongs to the run")] = False
    """Run model code that comes with the checkpoint."""
    device: Annotated[Literal["auto", "cpu", "cuda"], AT_START] = "auto"
    """Device of policy and rollout workers. auto uses cuda if torch finds a GPU."""


class SourceConfig(Section):
    """One of several sources of training data. Beside these settings it may have those of [data]
    that name a field (prompt_field, answer_field, ...), if its rows call the field differently."""

    model_config = ConfigDict(extra="allow")

    path: LocalPath
    """Rows of the source, in any form that data.path accepts."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    weight: Annotated[float, Field(ge=0)] | None = None
    """Share of the prompts that come from this source, in proportion to the weights of the others.
    If no source has a weight, the sources are one data set."""

    @property
    def renamed_fields(self) -> dict[str, str]:
        """Name of a field in this source, by the setting of [data] that names it."""
        return dict(self.model_extra or {})


class DataConfig(Section):
    change = Fixed("the ledger counts rows of this data set")

    path: LocalPath | None = None
    """Training data: a JSONL or Parquet file, a directory of such files, or the name or directory
    of a Hugging Face data set. Either this or data.sources is needed."""
    sources: Annotated[dict[Annotated[str, Field(pattern=SOURCE_NAME)], SourceConfig], NEWER] = (
        Field(default_factory=dict)
    )
    """Several sources of training data, each as a table [data.sources.NAME]."""
    open_timeout_s: Annotated[Seconds, AT_START] = 1800.0
    """Longest time to open the data. After it the controller ends with an error that names the
    data."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    prompt_field: str = "prompt"
    """Field with the prompt: text, or a list of chat messages for the tokenizer's chat template."""
    answer_field: str | None = "answer"
    """Field that is passed to rewards as the reference answer. If none, rewards receive only the
    row."""
    messages_field: Annotated[str | None, NEWER] = None
    """Recorded data: field with a chat. The assistant's turns are trained, the others are read."""
    completion_field: Annotated[str | None, NEWER] = None
    """Recorded data: field with the completion of prompt_field, as text or as chat messages."""
    chosen_field: Annotated[str | None, NEWER] = None
    """Recorded data: field with the better one of two completions, as text or as chat messages. A
    whole chat may stand in both fields; prompt_field is not needed then."""
    rejected_field: Annotated[str | None, NEWER] = None
    """Recorded data: field with the worse one of two completions."""
    margin_field: Annotated[str | None, NEWER] = None
    """Recorded data: field with a positive number, by how much chosen is better. If none, it is 1.
    """
    label_field: Annotated[str | None, NEWER] = None
    """Recorded data: field that is true for a good completion and false for a bad one."""
    chat: bool = False
    """Wrap a text prompt as one user message and apply the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message put before the chat messages, unless the row has its own."""
    prompt_template: Annotated[str | None, NEWER] = None
    """Text of the prompt, with the names of fields in braces: "Question: {question}\\nAnswer:". It
    takes the place of data.prompt_field. {{ and }} stand for braces."""
    prompt_suffix: Annotated[str, NEWER] = ""
    """Text that is put after every prompt; after the last user message, if the prompt is chat
    messages."""
    chat_template_args: Annotated[dict[str, Any], NEWER] = Field(default_factory=dict)
    """Arguments of the tokenizer's chat template, for example { enable_thinking = false }."""
    shuffle: bool = True
    """Shuffle the rows in each pass over the data, by run.seed. If false, rows keep the order of
    the file."""
    max_prompt_tokens: Positive = 4096
    """Longest prompt, in tokens. See long_prompts."""
    long_prompts: Annotated[Literal["drop", "truncate_left", "truncate_right"], NEWER] = "drop"
    """Treatment of prompts with more than max_prompt_tokens. drop: they are dropped, with a
    reason. truncate_left, truncate_right: the text of the row loses its beginning or its end, until
    the prompt fits; template, system prompt and suffix stay whole."""
    curriculum: Annotated[Literal["success_rate"] | None, NEWER] = None
    """success_rate: prompts that were always or never solved are drawn less. Each group in a row
    whose rewards are all equal halves the probability that the prompt is drawn in the next epoch.
    If none, every epoch draws every prompt."""
    curriculum_min: Annotated[float, Field(gt=0, le=1), NEWER] = 0.1
    """Lowest probability to which the curriculum reduces a prompt."""
    eval_path: LocalPath | None = None
    """Held-out data, in any form that data.path accepts. If none, the run has no evaluations."""
    eval_split: str = "test"
    """Split of a held-out Hugging Face data set."""

    @property
    def row_form(self) -> RowForm | None:
        """Form of recorded rows; None if no field of recorded data is named."""
        if self.messages_field is not None:
            return RowForm.CHAT
        if self.chosen_field is not None:
            return RowForm.PAIR
        if self.label_field is not None:
            return RowForm.LABELLED
        return None if self.completion_field is None else RowForm.COMPLETION

    @property
    def described(self) -> str:
        """Place of the training data, for people."""
        if self.path is not None:
            return self.path
        return ", ".join(source.path for source in self.sources.values())

    @field_validator("sources", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        """`[[data.sources]]` is a list: its sources are source_0, source_1, ..."""
        if isinstance(value, list):
            return {f"source_{n}": source for n, source in enumerate(value)}
        return value

    @field_validator("prompt_template")
    @classmethod
    def _is_template(cls, template: str | None) -> str | None:
        if template is not None:
            try:
                placeholders(template)
            except ValueError as error:
                raise ValueError(f"data.prompt_template: {error}") from None
        return template

    @field_validator("chat_template_args")
    @classmethod
    def _ours(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        for name in arguments:
            if name in TEMPLATE_ARGS:
                raise ValueError(
                    f"data.chat_template_args: {name} is set by Paceline. Remove it: only "
                    "arguments that the template itself reads belong here"
                )
        return arguments

    @model_validator(mode="after")
    def _one_place(self) -> DataConfig:
        if (self.path is None) == (not self.sources):
            found = "are both set" if self.sources else "are both missing"
            raise ValueError(
                f"data.path and data.sources {found}: give data.path for one source of rows, or a "
                "table [data.sources.NAME] for each of several"
            )
        for name, source in self.sources.items():
            for setting, field in source.renamed_fields.items():
                _check_renamed(name, setting, field, type(self).model_fields)
        weights = {name: source.weight for name, source in self.sources.items()}
        without = [name for name, weight in weights.items() if weight is None]
        if without and len(without) < len(weights):
            raise ValueError(
                f"data.sources.{without[0]}.weight is missing: give every source a weight, or none "
                "of them"
            )
        if weights and not without and not any(weights.values()):
            raise ValueError(
                "data.sources: all weights are 0. Give at least one source a weight above 0"
            )
        return self


def _check_renamed(source: str, setting: str, field: object, known: Mapping[str, Any]) -> None:
    names = [name for name in known if name.endswith("_field")]
    if setting not in names:
        raise ValueError(
            f"data.sources.{source}.{setting} is not a setting of a source: it has "
            f"{', '.join([*SourceConfig.model_fields, *names])}"
        )
    if not isinstance(field, str):
        raise ValueError(f"data.sources.{source}.{setting} = {field!r}: give the name of a field")


class RewardConfig(Section):
    change = Fixed("groups in flight were scored with them")

    functions: list[str] | dict[str, float] = Field(default_factory=lambda: ["exact_match"])
    """Rewards: built-in names (exact_match, math_verify, math_boxed, math_boxed:intervals,
    format:REGEX), package.module:function, or scorer:NAME for a scorer of [scorers]. As a table,
    each has a weight."""
    timeout_s: Annotated[Seconds, LEASE] = 10.0
    """Time limit of one reward call, in seconds. The attempt fails if a call exceeds it."""
    processes: Annotated[NonNegative, AT_START] = 1
    """Processes that score completions, per rollout worker. 0 scores in the worker itself,
    where only async functions have a time limit."""
    overlong_buffer: Annotated[NonNegative, NEWER] = 0
    """Soft penalty of long completions, in tokens (DAPO): within this many tokens of the length
    limit the reward falls linearly, by overlong_penalty at the limit. It is not applied to held-out
    prompts. 0: none."""
    overlong_penalty: Annotated[float, Field(gt=0), NEWER] = 1.0
    """Reward that a completion at the length limit loses."""


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


class LossConfig(Section):
    """The policy loss: its advantages, ratios, clips and further terms."""

    change = Fixed(OBJECTIVE)

    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "dr_grpo"] = "token_mean"
    """How token losses become one number. token_mean: mean over all tokens of the step (DAPO).
    sequence_mean: mean over each sequence, then over sequences (GRPO). sequence_sum: sum over each
    sequence, then the mean over sequences (RLOO). dr_grpo: sum divided by the
    longest completion, which is rollout.max_tokens, or with an environment rollout.max_context
    (Dr. GRPO)."""
    advantage: Annotated[Literal["group", "leave_one_out", "step", "group_step"], NEWER] = "group"
    """Baseline of a reward. group: the mean of its group (GRPO). leave_one_out: the mean
    of the group's others (RLOO). step: the mean of all samples of the step (REINFORCE++).
    group_step: the mean of its group, and the standard deviation is that of the step
    (REINFORCE++-baseline).
    """
    advantage_norm: bool = True
    """Divide advantages by the standard deviation of the rewards: of the group's, or with advantage
    = "step" and "group_step" of the step's."""
    surrogate: Annotated[Literal["clip", "weight"], NEWER] = "clip"
    """How the importance ratio enters. clip: the smaller of the ratio and the clipped ratio times
    the advantage, so that tokens beyond the clip have no gradient (PPO). weight: the clipped ratio
    is a constant weight of the log-prob, so that every token keeps its gradient (CISPO)."""
    importance_level: Annotated[Literal["token", "sequence"], NEWER] = "token"
    """token: each token has its ratio. sequence: all tokens of a completion have the geometric mean
    of their ratios (GSPO)."""
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
    truncation. In the policy's term it applies with proximal = trainer or interpolated; with
    behaviour the ratio itself has this weight. The weight of the KL term has this cap with every
    proximal.
    """
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
    """Estimator of the KL term in the loss, named as by Schulman."""
    kl_in: Annotated[Literal["loss", "reward"], NEWER] = "loss"
    """loss: the KL term is a part of the loss. reward: each token's advantage is lowered by kl_coef
    times the log-ratios to the reference model from this token to the end of the completion."""
    entropy_coef: Annotated[float, Field(ge=0), NEWER] = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy at the trained tokens, in nats,
    is added to what is maximised."""
    router_aux_loss_coef: Annotated[float, Field(ge=0), NEWER] = 0.0
    """Weight of the load-balancing loss of a mixture of experts: 1 per completion if its experts
    get equal shares, more if they do not. 0 leaves it out. Many models were trained with 0.001."""
    overlong_filter: Annotated[bool, NEWER] = False
    """Completions that were cut at the length limit give no gradient. Their rewards still count in
    the advantages of the others (DAPO)."""
    covariance: Annotated[Literal["none", "clip", "kl"], NEWER] = "none"
    """Keeps the entropy from collapsing by the few tokens whose log-prob and advantage vary
    together most. clip: a random covariance_share of the tokens in covariance_range has no gradient
    (Clip-Cov). kl: the covariance_share of tokens with the largest covariance has a KL term to the
    policy that sampled, with covariance_kl_coef (KL-Cov).
    """
    covariance_share: Annotated[float, Field(gt=0, le=1), NEWER] = 2e-4
    """Share of the trained tokens that covariance chooses, group by group."""
    covariance_range: Annotated[tuple[float, float], NEWER] = (1.0, 5.0)
    """Range of covariances from which covariance = "clip" chooses."""
    covariance_kl_coef: Annotated[float, Field(ge=0), NEWER] = 1.0
    """Weight of the KL term of covariance = "kl"."""
    reference: Annotated[str, Field(pattern=r"^(model|scorer:\w+)$"), NEWER] = "model"
    """Reference model of the KL term. model: the trainer loads reference_path. scorer:NAME: the
    scorer NAME, of kind logprobs, computes its log-probs, and no trainer holds it."""
    reference_path: LocalPath | None = None
    """Directory or hub name of the reference model. Default: model.path."""
    skip_zero_advantage: bool = True
    """Skip sequences that cannot contribute to the gradient: those with zero advantage, if there
    is no KL term. The gradient is the same; entropy, ratio, effective sample size and log-prob gap
    are then measured over the other sequences."""

    @field_validator("mask_ratio_token", "mask_ratio_sequence", "covariance_range")
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

    gradient_sync: Literal["step", "row"] = "step"
    """When the ranks of a replica (fleet.policy_ranks above 1) sum their gradients: once for all
    rows of a step, for which each rank holds a whole gradient in float32 (4 bytes a parameter), or
    after every row, which holds only slices and communicates more."""
    reshard_after_forward: bool = True
    """Weights that a rank keeps between the forward and the backward pass of a row. true:
    slices, and every block gathers its weights again in the backward pass, as in ZeRO-3. false: the
    gathered weights, as in ZeRO-2, which costs the memory of the whole model and saves half of the
    gathering. Gradients and moments are slices in both.
    """
    offload_optimizer: bool = False
    """Keep AdamW's moments in host memory. The device updates them in parts: a step moves 16 bytes
    a parameter over the bus, and the device needs 8 bytes a parameter less."""
    offload_frozen: bool = False
    """Keep the weights of frozen models, such as the reference, in host memory. Each block's are on
    the device only while it computes."""
    offload_activations: bool = False
    """Keep what a forward pass saves for its backward pass in host memory. With
    model.gradient_checkpointing, which it needs, this is the input of each block: 4 bytes a token,
    block and hidden dimension."""
    offload_publishing: bool = False
    """Keep the weights that rollout workers fetch in host memory: two copies in the engine's type,
    divided by the ranks of the replica that publishes. With several ranks the device then holds 32
    MiB of them while they are copied."""
    tokens_per_microbatch: Positive = 8192
    """Tokens of a micro-batch, to which sequences are packed without padding. A shared prompt
    counts once for each completion that attends to it, so this number bounds the memory."""
    logits_chunk_mb: Positive = 128
    """Most logits of one model held at once, in MiB of float32. Larger rows are scored in chunks of
    tokens, whose logits are computed again in the backward pass. Working memory is a few times this
    number ([performance](performance.md#memory-of-the-vocabulary))."""


class TrainConfig(Section):
    change = STEP

    algorithm: Annotated[str, Fixed(OBJECTIVE)] = "grpo"
    """Objective of a step. The GRPO family: grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce++,
    reinforce++-baseline, whose names give other defaults to the settings below. With a critic: ppo.
    For preferences: dpo, ipo, orpo, kto, online_dpo, reward_model. From a teacher: distill. For
    recorded answers: sft. One of your own: package.module:Class. Options of an objective are in
    [objective]; see docs/algorithms.md.
    """
    steps: Positive | None = None
    """Optimizer steps of the run: 100 if neither epochs nor max_samples is set. Only one of the
    three may be set."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Length of the run in passes over the training data, instead of steps. The steps are rounded
    up: the last one is filled with rows of the next pass."""
    max_samples: Positive | None = None
    """Length of the run in samples (completions), instead of steps. The steps are rounded down."""
    groups_per_step: Annotated[
        Positive, Fixed("steps that a rollback repeats have this many groups")
    ] = 32
    """Global batch size in groups, independent of the number of replicas. A group is the
    completions of one prompt."""
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
    max_nonfinite_steps: Annotated[
        Positive | None, Fixed("the ledger counts steps without a finite gradient by it")
    ] = 10
    """The run fails after this many steps in a row whose gradient is not finite. Such a step
    changes no weight. none disables the limit."""
    filter_uninformative: Annotated[bool, Fixed(OBJECTIVE)] = False
    """Drop groups whose rewards are all equal, which have zero advantage, and generate others
    instead."""
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
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, settings: Any) -> Any:
        if not isinstance(settings, dict):
            return settings
        given = [name for name in LENGTHS if settings.get(name) not in (None, "none")]
        if len(given) > 1:
            raise ValueError(
                f"train.{given[0]} and train.{given[1]} are both set, and each is the length of "
                "the run: keep one, "
                f'and set the other to "none"'
            )
        return settings if given else {**settings, "steps": DEFAULT_STEPS}

    @property
    def token_age(self) -> int:
        """max_token_age, or its default."""
        if self.max_token_age is not None:
            return self.max_token_age
        return max(8, 8 * self.max_staleness)

    @model_validator(mode="before")
    @classmethod
    def _published(cls, given: Any) -> Any:
        """Defaults of the algorithm's name, which a setting of the user's own goes before."""
        return with_defaults(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _informative(self) -> TrainConfig:
        if self.filter_uninformative and self.loss.advantage == "step":
            raise ValueError(
                "train.filter_uninformative = true drops groups whose rewards are equal, and with "
                "train.loss.advantage = "
                "step they are compared with the rest of the step: set it to false"
            )
        return self

    @model_validator(mode="after")
    def _admitted_tokens_count(self) -> TrainConfig:
        if self.max_token_age is not None and self.max_token_age < self.max_staleness:
            raise ValueError(
                f"train.max_token_age = {self.max_token_age} masks tokens that train.max_staleness "
                f"= {self.max_staleness} allows: set it to at least {self.max_staleness}"
            )
        return self
