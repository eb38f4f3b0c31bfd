"""Rules between settings of several sections. A section checks its own settings by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config.fields import RowForm
from paceline.config.objectives import BUILT_IN, FAMILY, TERMS, ignored, problem_of
from paceline.config.sections.evaluation import problem_of_evaluation
from paceline.config.sections.objective_options import DistillOptions, PairOptions
from paceline.config.sections.scorers import problem_of_scorers
from paceline.config.sections.training import BUILT_IN_REWARDS

if TYPE_CHECKING:
    from paceline.config.schema import Config


@dataclass(frozen=True, slots=True)
class Rule:
    """A contradiction between settings, and the remedy."""

    when: Callable[[Config], object]
    text: str
    """The first setting that it names is the place of the error. ``c`` is the config."""

    def __call__(self, config: Config) -> str:
        return self.text.format(c=config) if self.when(config) else ""


def problem(config: Config) -> str:
    """The first rule that ``config`` breaks, with the remedy; empty if it breaks none."""
    return next((text for rule in RULES if (text := rule(config))), "")


NAME_ONE = (
    "data.messages_field (whole chats), data.completion_field (a completion of data.prompt_field), "
    "or data.chosen_field and data.rejected_field (pairs)"
)
_FIELDS = ("messages", "completion", "chosen", "rejected", "margin", "label")
_NEEDED = {"rejected": "chosen", "chosen": "rejected", "margin": "chosen", "label": "completion"}


def _scorers(c: Config) -> str:
    sets = c.evaluation.sets.values()
    rewards = [*c.reward.functions, *(name for held_out in sets for name in held_out.reward or ())]
    return problem_of_scorers(c.scorers.by_name, rewards, c.train.loss.reference, c.fleet.scorers)


def _teacher(c: Config) -> str:
    if c.train.algorithm != "distill":
        return ""
    teacher = str(c.objective.options.get("teacher", DistillOptions().teacher))
    scorer = c.scorers.by_name.get(teacher)
    if scorer is not None and scorer.kind == "logprobs":
        return ""
    return (
        "train.algorithm = distill: the teacher is a scorer of kind logprobs, and there is none "
        "named "
        f"{teacher!r}. Add a section [scorers.{teacher}], or name another in objective.teacher"
    )


def _named(c: Config) -> list[str]:
    """Fields of recorded rows that [data] names, without "_field"."""
    return [name for name in _FIELDS if getattr(c.data, f"{name}_field") is not None]


def _recorded_fields(c: Config) -> str:
    named = _named(c)
    if not c.recorded:
        return (
            f'data.{named[0]}_field has no effect unless rollout.source = "recorded"'
            if named
            else ""
        )
    for name in named:
        if (other := _NEEDED.get(name)) is not None and other not in named:
            return f"data.{name}_field needs data.{other}_field: set it as well"
    ways = [name for name in ("messages", "completion", "chosen") if name in named]
    if not ways:
        return f'rollout.source = "recorded" needs the field with the completions: set {NAME_ONE}'
    if len(ways) > 1:
        return f"data.{ways[0]}_field and data.{ways[1]}_field: a row has one form. Set {NAME_ONE}"
    return ""


def _chat_without_template(c: Config) -> str:
    for name in ("prompt_template", "prompt_suffix"):
        if c.recorded and c.data.row_form is RowForm.CHAT and getattr(c.data, name):
            return (
                f"data.{name} has no effect on whole chats, which data.messages_field names: "
                "remove it, and put its text into the messages"
            )
    return ""


def _recorded_form(c: Config) -> str:
    form, entry = c.data.row_form, BUILT_IN.get(c.train.algorithm)
    if not c.recorded or form is None:
        return ""
    if entry is not None and entry.forms and form not in entry.forms:
        return (
            f'train.algorithm = "{c.train.algorithm}" does not train rows of the form {form}: set '
            f"the fields of {' or '.join(entry.forms)}: {NAME_ONE}"
        )
    if c.rollout.group_size != form.completions:
        return (
            f"rollout.group_size = {c.rollout.group_size}, but a row of the form {form} gives "
            f"{form.completions}: leave rollout.group_size out"
        )
    return ""


def _terms(c: Config) -> str:
    missing = [f"train.loss.{name}" for name in ignored(c.train) if name in TERMS]
    if not missing:
        return ""
    return (
        f"{' and '.join(missing)}: train.algorithm = {c.train.algorithm} has no such term in its "
        "loss. Remove it, or choose another algorithm (docs/algorithms.md)"
    )


def _answers(c: Config) -> str:
    # An environment may score its samples itself; reward.functions are then not called.
    scored = c.rollout.environment is None and not c.recorded
    for name in c.reward.functions:
        if c.data.answer_field is None and scored and name in BUILT_IN_REWARDS:
            return (
                f"{name} compares with the answer: set data.answer_field, or choose other "
                "reward.functions"
            )
    return ""


def _pairs(c: Config) -> bool:
    return issubclass(c.built_in.options, PairOptions) if c.built_in else False


def _alone(c: Config) -> bool:
    """Groups of one completion, which the objective compares with others."""
    learns = c.built_in is not None and c.built_in.groups_of_one
    return c.rollout.group_size == 1 and not c.recorded and not learns


RULES: tuple[Callable[[Config], str], ...] = (
    lambda c: problem_of(c.train.algorithm, c.objective.options),
    _scorers,
    Rule(
        lambda c: c.recorded and c.train.loss.reference != "model",
        "train.loss.reference: scorers are asked about sampled completions, and rollout.source = "
        'recorded has none. Set train.loss.reference = "model"',
    ),
    _teacher,
    Rule(
        lambda c: c.train.algorithm == "distill" and c.train.filter_uninformative,
        "train.filter_uninformative drops groups by their rewards, which distillation does not "
        "use: set it to false",
    ),
    lambda c: problem_of_evaluation(c.data, c.evaluation, recorded=c.recorded),
    Rule(
        lambda c: c.train.steps is not None and c.train.optimizer.warmup_steps > c.train.steps,
        "train.optimizer.warmup_steps is larger than train.steps",
    ),
    Rule(
        lambda c: c.train.max_samples is not None and c.train.max_samples < c.samples_per_step,
        "train.max_samples = {c.train.max_samples} is less than one step, which has "
        "{c.samples_per_step} samples (train.groups_per_step x rollout.group_size)",
    ),
    Rule(
        lambda c: c.train.memory.offload_activations and not c.model.gradient_checkpointing,
        "train.memory.offload_activations moves what gradient checkpointing keeps, and "
        "model.gradient_checkpointing is false. Set model.gradient_checkpointing = true",
    ),
    Rule(
        lambda c: not c.recorded and not _named(c) and c.built_in and not c.built_in.samples,
        'train.algorithm = "{c.train.algorithm}" trains recorded data: set rollout.source = '
        '"recorded"',
    ),
    _recorded_fields,
    Rule(
        lambda c: c.recorded and c.data.long_prompts != "drop",
        'data.long_prompts = "{c.data.long_prompts}": prompts of recorded rows are not truncated. '
        "A row "
        'whose prompt is too long is dropped, and counted: set data.long_prompts = "drop", or '
        "raise data.max_prompt_tokens",
    ),
    _chat_without_template,
    Rule(
        lambda c: c.recorded and c.train.algorithm in ("grpo", "online_dpo"),
        'train.algorithm = "{c.train.algorithm}" needs completions that the policy samples, and '
        'rollout.source = "recorded" has none: choose another one (docs/recorded-data.md)',
    ),
    _recorded_form,
    Rule(
        lambda c: c.recorded and c.rollout.environment is not None,
        'rollout.environment needs an engine, and rollout.source = "recorded" has none: remove one',
    ),
    Rule(
        lambda c: c.recorded and c.rollout.temperature != 1.0,
        "rollout.temperature = {c.rollout.temperature:g} would scale the log-probs of recorded "
        "completions: leave it at 1",
    ),
    Rule(
        lambda c: c.recorded and c.train.filter_uninformative,
        "train.filter_uninformative would drop recorded rows, whose rewards say nothing: remove it",
    ),
    Rule(
        lambda c: c.data.curriculum is not None and c.recorded,
        "data.curriculum compares the rewards of a prompt's sampled completions, and with "
        'rollout.source = "recorded" there are none to compare: remove it',
    ),
    Rule(
        lambda c: c.data.curriculum is not None and c.rollout.group_size == 1,
        "data.curriculum compares the rewards of a prompt's sampled completions, and with "
        "rollout.group_size = 1 there are none to compare: remove it",
    ),
    Rule(
        lambda c: _pairs(c) and c.rollout.group_size < 2,
        "train.algorithm = {c.train.algorithm} compares two completions of a prompt, and "
        "rollout.group_size = {c.rollout.group_size}: set it to 2 or more to compare sampled "
        'completions, or rollout.source to "recorded" for pairs of a file',
    ),
    Rule(
        lambda c: c.built_in and c.built_in.preference and c.train.loss.kl_coef > 0,
        "train.loss.kl_coef is not used by {c.train.algorithm}: set it to 0. If the objective "
        "compares with the reference, objective.beta says how closely the policy follows it",
    ),
    Rule(
        lambda c: c.train.algorithm == "kto" and c.train.filter_uninformative,
        "train.filter_uninformative drops groups whose rewards are all equal, and kto learns from "
        "each completion alone: set it to false",
    ),
    Rule(
        lambda c: (
            _alone(c)
            and c.train.algorithm in FAMILY
            and c.train.loss.advantage != "step"
            and c.train.loss.kl_coef == 0
        ),
        "rollout.group_size = 1: an advantage is relative to the other completions of the prompt, "
        "so it is always 0 and nothing is learnt. Set it to 2 or more, or train.algorithm = ppo",
    ),
    Rule(
        lambda c: _alone(c) and c.train.filter_uninformative,
        "train.filter_uninformative with rollout.group_size = 1: the rewards of a group of one are "
        "all equal, so every group would be dropped. Set train.filter_uninformative = false",
    ),
    _terms,
    Rule(
        lambda c: c.option("kl_controller") == "adaptive" and c.train.loss.kl_coef == 0,
        "objective.kl_controller = adaptive: it multiplies train.loss.kl_coef, which is 0. Set "
        "train.loss.kl_coef above 0",
    ),
    Rule(
        lambda c: c.reward.overlong_buffer >= c.longest_completion,
        "reward.overlong_buffer = {c.reward.overlong_buffer} is not below "
        "rollout.{c.length_setting} = {c.longest_completion}, so every completion would lose "
        "reward: set it to a part of the limit",
    ),
    Rule(
        lambda c: c.fleet.heartbeat_s * 2 > c.fleet.lease_ttl_s,
        "fleet.lease_ttl_s must be at least twice fleet.heartbeat_s",
    ),
    _answers,
)
"""The first that a config breaks is reported."""
