"""Sections of the configuration about training: run, model, data, rewards and the trainer."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline.config.fields import (
    AT_START,
    CARRIED,
    LEASE,
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
from paceline.errors import did_you_mean

LENGTHS = ("steps", "epochs", "max_samples")
"""Settings of [train] that say how long the run is; one of them is set."""
DEFAULT_STEPS = 100
TEMPLATE_ARGS = {
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
"""Arguments of apply_chat_template that a run sets itself."""
ROW_TOKENS = 8192
"""Tokens of a row as long as no memory plan has settled them."""
SOURCE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"

BUILT_IN_REWARDS: Mapping[str, str] = {
    "exact_match": "exact_match",
    "math_verify": "math_verify",
    "math_boxed": "math_boxed",
    "math_boxed:intervals": "math_boxed_intervals",
}
"""Rewards that are built in, beside format:REGEX, all of which compare with the row's answer: name
in the configuration, and name of the function among the rewards of the rollout worker."""


def _names_rewards(value: Any) -> Any:
    """Raises ValueError for a list or table of rewards with a name or weight that cannot be one."""
    if isinstance(value, str):
        raise ValueError(f'{value!r} is no list. Write ["{value}"], or a table with weights')
    if isinstance(value, list | dict) and not 0 < len(value) == len(set(map(str, value))):
        raise ValueError("name at least one reward, and each of them once")
    for name in value if isinstance(value, list | dict) else ():
        own = isinstance(name, str) and (":" in name or name in BUILT_IN_REWARDS)
        if isinstance(name, str) and not own:
            raise ValueError(
                f"{name} is not a reward. {did_you_mean(name, BUILT_IN_REWARDS)}Name one that is "
                f"built in ({', '.join(BUILT_IN_REWARDS)}, format:REGEX), a scorer as scorer:NAME, "
                "or a function of your own as package.module:function"
            )
    for name, weight in value.items() if isinstance(value, dict) else ():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not abs(weight) < CARRIED:  # NaN is not either
            raise ValueError(f"the weight of {name} is {weight!r:.40}. Write a finite number")
    return value


Rewards = Annotated[list[str] | dict[str, float], BeforeValidator(_names_rewards)]


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


ALL_LINEAR: Final = "all-linear"
SETTINGS_FILE = "adapter_config.json"
"""In a directory of adapters, what PEFT writes about them."""


class LoraConfig(Section):
    """Adapters: the weights of model.path stay as they are, and two thin matrices beside its linear
    layers are trained."""

    change = Fixed("checkpoints hold these adapters and their optimizer state")

    rank: Positive
    """Rows of the first matrix and columns of the second. RL needs few, fine-tuning on much data
    more (Schulman et al., LoRA Without Regret, 2025)."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Its addition is multiplied by alpha / rank. With one alpha, about the same learning rate fits
    every rank (the same source)."""
    targets: Literal["all-linear"] | list[str] = ALL_LINEAR
    """Layers with an adapter. all-linear: each linear layer of the transformer blocks. A list names
    some of these by how their names end ("q_proj"), also with * ("layers.1?.mlp.*")."""
    dropout: Literal[0] = 0
    """There is none: the log-probs of a ratio must be those of the policy that sampled."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Random numbers of the first matrix: uniform in ±1/√columns, or of standard deviation 1/rank.
    The second one begins with zeros."""
    path: LocalPath | None = None
    """Directory of adapters as PEFT writes them, with which the policy begins."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @field_validator("targets")
    @classmethod
    def _some(cls, targets: str | list[str]) -> str | list[str]:
        if isinstance(targets, list) and not (targets and all(targets)):
            raise ValueError('model.lora.targets names no layer. Write "all-linear" or ["q_proj"]')
        return targets


class ModelConfig(Section):
    change = Fixed("checkpoints hold this model and its optimizer state")

    path: LocalPath
    """The model to train: a directory or hub name for `AutoModelForCausalLM.from_pretrained`."""
    initial_checkpoint: Annotated[LocalPath | None, Fixed("the run has begun with it")] = None
    """Checkpoint of another run with which this one begins; its optimizer state is used if it fits.
    `paceline up --from` sets it."""
    tokenizer: Annotated[
        LocalPath | None, Fixed("groups in flight are token ids of this tokenizer")
    ] = None
    """Directory or hub name of the tokenizer. Default: `model.path`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the trainer's compute. auto: bfloat16 on CUDA, float32 on the CPU. Weights and
    optimizer state are always float32."""
    gradient_checkpointing: Annotated[bool | Literal["auto"], AT_START] = "auto"
    """Recompute activations in the backward pass: less memory, a third more compute. auto: on CUDA
    if the memory plan has no room for rows without it."""
    attention: Annotated[Literal["auto", "varlen", "sdpa", "flex"], AT_START] = "auto"
    """sdpa: PyTorch's attention, which copies a shared prompt for each completion. flex: a compiled
    block-sparse kernel without copies or padding; on a CPU it is for checks only. varlen:
    flash attention over a row's sequences side by side, on CUDA in bfloat16, else sdpa. auto: flex
    on CUDA in bfloat16, else sdpa."""
    compile: Annotated[bool | Literal["auto"], AT_START] = "auto"
    """Compile each transformer block of the trainer, and its head, with torch.compile. auto: on
    CUDA, for architectures that transformers compiles whole. If it fails, the run goes on without.
    """
    trust_remote_code: Annotated[bool, Fixed("the model's code belongs to the run")] = False
    """Run model code that comes with the checkpoint."""
    device: Annotated[Literal["auto", "cpu", "cuda"], AT_START] = "auto"
    """Device of policy and rollout workers. auto uses cuda if torch finds a GPU."""
    lora: LoraConfig | None = None
    """Train adapters instead of the whole model."""

    @property
    def recomputes(self) -> bool:
        """gradient_checkpointing, off as long as no memory plan has settled it."""
        return self.gradient_checkpointing is True


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
    """Share of the prompts, relative to the other weights. Without any, the sources are one data
    set."""

    @property
    def renamed_fields(self) -> dict[str, str]:
        """Name of a field in this source, by the setting of [data] that names it."""
        return dict(self.model_extra or {})


class DataConfig(Section):
    change = Fixed("the ledger counts rows of this data set")

    path: LocalPath | None = None
    """Training data: a JSONL or Parquet file, a directory of such files, or the name or directory
    of a Hugging Face data set. Either this or data.sources."""
    sources: dict[Annotated[str, Field(pattern=SOURCE_NAME)], SourceConfig] = Field(
        default_factory=dict
    )
    """Several sources of training data, each as a table [data.sources.NAME]."""
    open_timeout_s: Annotated[Seconds, AT_START] = 1800.0
    """Longest time to open the data, after which the run fails."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    prompt_field: str = "prompt"
    """Field with the prompt: text, or a list of chat messages for the tokenizer's chat template."""
    answer_field: str | None = "answer"
    """Field that rewards receive as the reference answer. If none, they receive only the row."""
    messages_field: str | None = None
    """Recorded data: field with a chat. The assistant's turns are trained, the others are read."""
    completion_field: str | None = None
    """Recorded data: field with the completion of prompt_field, as text or as chat messages."""
    chosen_field: str | None = None
    """Recorded data: field with the better of two completions, as text or messages. Whole chats in
    both fields need no prompt_field."""
    rejected_field: str | None = None
    """Recorded data: field with the worse one of two completions."""
    margin_field: str | None = None
    """Recorded data: field with a positive number, by how much chosen is better."""
    label_field: str | None = None
    """Recorded data: field that is true for a good completion and false for a bad one."""
    chat: bool = False
    """Wrap a text prompt as one user message and apply the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message put before the chat messages, unless the row has its own."""
    prompt_template: str | None = None
    """Prompt with names of fields in braces, in place of data.prompt_field: "Question:
    {question}\\nAnswer:". {{ and }} stand for braces."""
    prompt_suffix: str = ""
    """Text that is put after every prompt, or after its last user message."""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the tokenizer's chat template, for example { enable_thinking = false }."""
    shuffle: bool = True
    """Shuffle the rows in each pass over the data, by run.seed."""
    max_prompt_tokens: Positive = 4096
    """Longest prompt, in tokens. See long_prompts."""
    long_prompts: Literal["drop", "truncate_left", "truncate_right"] = "drop"
    """Prompts above max_prompt_tokens: drop them, or truncate the row's text at its beginning or
    end until the prompt fits; template, system prompt and suffix stay whole."""
    curriculum: Literal["success_rate"] | None = None
    """success_rate: each group in a row whose rewards are all equal halves the probability that its
    prompt is drawn in the next epoch. If none, every epoch draws every prompt."""
    curriculum_min: Annotated[float, Field(gt=0, le=1)] = 0.1
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

    @model_validator(mode="after")
    def _one_place(self) -> "DataConfig":
        if ours := sorted(self.chat_template_args.keys() & TEMPLATE_ARGS):
            raise ValueError(f"data.chat_template_args: {ours[0]} is set by Paceline. Remove it")
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

    functions: Rewards = Field(default_factory=lambda: ["exact_match"])
    """Rewards: exact_match, math_verify, math_boxed, math_boxed:intervals, format:REGEX,
    package.module:function, or scorer:NAME. As a table, each has a weight."""
    timeout_s: Annotated[Seconds, LEASE] = 10.0
    """Time limit of one reward call, in seconds. The attempt fails if a call exceeds it."""
    processes: Annotated[NonNegative, AT_START] = 1
    """Processes that score, per rollout worker. 0: the worker, where only async functions have a
    limit."""
    overlong_buffer: NonNegative = 0
    """Soft penalty of long completions (DAPO): in this many tokens before the length limit the
    reward falls linearly, by overlong_penalty. Not for held-out prompts. 0: none."""
    overlong_penalty: Annotated[float, Field(gt=0)] = 1.0
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
    covariance: Literal["none", "clip", "kl"] = "none"
    """Keeps entropy from collapsing by the tokens whose log-prob and advantage vary together most.
    clip: a random covariance_share of those in covariance_range has no gradient (Clip-Cov). kl: the
    covariance_share with the largest has a KL term (KL-Cov)."""
    covariance_share: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Share of the trained tokens that covariance chooses, group by group."""
    covariance_range: tuple[float, float] = (1.0, 5.0)
    """Range of covariances from which covariance = "clip" chooses."""
    covariance_kl_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the KL term of covariance = "kl"."""
    reference: Annotated[str, Field(pattern=r"^(model|scorer:\w+)$")] = "model"
    """Reference of the KL term. model: the trainer loads reference_path. scorer:NAME: a scorer of
    kind logprobs, and no trainer holds it."""
    reference_path: LocalPath | None = None
    """Directory or hub name of the reference model. Default: model.path."""
    skip_zero_advantage: bool = True
    """Skip sequences of zero advantage, if there is no KL term. The gradient is the same; entropy,
    ratio and log-prob gap are measured over the others."""

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
    """Ranks of a replica sum gradients once a step, for which each holds a whole float32 gradient,
    or after every row, which holds slices and communicates more."""
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
    logits_chunk_mb: Positive = 128
    """Most logits held at once, in MiB of float32; a few times this is the working memory
    ([performance](performance.md#memory-of-the-vocabulary))."""

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
    def _admitted_tokens_count(self) -> "TrainConfig":
        if self.max_token_age is not None and self.max_token_age < self.max_staleness:
            raise ValueError(
                f"train.max_token_age = {self.max_token_age} masks tokens that train.max_staleness "
                f"= {self.max_staleness} allows: set it to at least {self.max_staleness}"
            )
        return self
