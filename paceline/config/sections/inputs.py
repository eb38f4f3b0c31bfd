"""Sections of the configuration about what a run trains, and on what: model, data and rewards."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from paceline.config.fields import (
    AT_START,
    CARRIED,
    LEASE,
    Fixed,
    LocalPath,
    NonNegative,
    Positive,
    RowForm,
    Seconds,
    Section,
)
from paceline.config.prompt_template import placeholders
from paceline.errors import did_you_mean

TEMPLATE_ARGS = {
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
    *("continue_final_message", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
"""Arguments of apply_chat_template that a run sets itself."""
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
    attention: Annotated[Literal["auto", "sdpa", "flex"], AT_START] = "auto"
    """sdpa: PyTorch's attention, which copies a shared prompt for each completion. flex: a compiled
    block-sparse kernel without copies or padding; on a CPU it is for checks only. auto: flex on
    CUDA in bfloat16, else sdpa."""
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
    """System message put before the chat messages, unless the row has its own. With one, a text
    prompt becomes a message, as with data.chat."""
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
