"""Rules between settings of several sections. A section checks its own settings by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from paceline.config.fields import RowForm
from paceline.config.objectives import FAMILY, TERMS, ignored, problem_of
from paceline.config.sections.evaluation import HELD_OUT
from paceline.config.sections.inputs import BUILT_IN_REWARDS
from paceline.config.sections.objective_options import DistillOptions, PairOptions
from paceline.config.sections.scorers import named_scorer
from paceline.errors import did_you_mean
from paceline.evaluation import row_metrics

if TYPE_CHECKING:
    from paceline.config.schema import Config


@dataclass(frozen=True, slots=True)
class Rule:
    """A contradiction between settings, and the remedy."""

    when: Callable[[Config], object]
    text: str
    """The first setting that it names is the place of the error. ``c`` is the config."""

    def __call__(self, config: Config) -> Iterator[str]:
        if self.when(config):
            yield self.text.format(c=config)


def problem(config: Config) -> str:
    """The first rule that ``config`` breaks, with the remedy; empty if it breaks none."""
    return next((text for rule in RULES for text in rule(config)), "")


NAME_ONE = (
    "data.messages_field (whole chats), data.completion_field (a completion of data.prompt_field), "
    "or data.chosen_field and data.rejected_field (pairs)"
)
_FIELDS = ("messages", "completion", "chosen", "rejected", "margin", "label")
_NEEDED = {"rejected": "chosen", "chosen": "rejected", "margin": "chosen", "label": "completion"}
SAMPLED = {
    "train.loss.reference": "asks scorers about sampled completions",
    "train.filter_uninformative": "drops groups by the rewards of sampled completions",
    "data.long_prompts": "truncates prompts for an engine, and a recorded row that is too long is "
    "dropped and counted",
    "evaluation.sets": "needs an engine, and data.eval_path gives the held-out loss",
    "evaluation.best_metric": "needs an engine, and data.eval_path gives the held-out loss",
    "rollout.environment": "needs an engine",
    "weights.url": "is for the weights of engines",
    "rollout.temperature": "would scale the log-probs of recorded completions",
}
"""Settings that a run of recorded data leaves at their defaults, and what they do else."""


def _objective(c: Config) -> Iterator[str]:
    if text := problem_of(c.train.algorithm, c.objective.options):
        yield text


def _scorers(c: Config) -> Iterator[str]:
    scorers, counts = c.scorers.by_name, c.fleet.scorers
    known = ", ".join(scorers) or "there are none"
    sets = c.evaluation.sets.values()
    rewards = [*c.reward.functions, *(name for held_out in sets for name in held_out.reward or ())]
    uses = [*(("reward.functions", reward) for reward in rewards)]
    for setting, use in [*uses, ("train.loss.reference", c.train.loss.reference)]:
        if (name := named_scorer(use)) is None:
            continue
        if name not in scorers:
            meant = did_you_mean(name, scorers) or f"Add a section [scorers.{name}]"
            yield f"{setting}: no scorer {name!r} ({known}). {meant.rstrip()}"
        elif (scorers[name].kind == "logprobs") == (setting == "reward.functions"):
            wanted = "one of kind logprobs"
            if setting == "reward.functions":
                wanted = "a reward_model or judge, which gives one number for a completion"
            yield f"{setting}: the scorer {name} is of kind {scorers[name].kind}. Name {wanted}"
    for name in counts if isinstance(counts, dict) else ():
        if name not in scorers:
            meant = did_you_mean(name, scorers)
            yield f"fleet.scorers: there is no scorer {name!r} ({known}). {meant}".rstrip(". ")
    teacher = str(c.objective.options.get("teacher", DistillOptions().teacher))
    found = scorers.get(teacher)
    if c.train.algorithm == "distill" and (found is None or found.kind != "logprobs"):
        yield (
            "train.algorithm = distill: the teacher is a scorer of kind logprobs, and there is "
            f"none named {teacher!r}. {did_you_mean(teacher, scorers)}Add a section "
            f"[scorers.{teacher}], or name another in objective.teacher"
        )


def _evaluation(c: Config) -> Iterator[str]:
    data, sets = c.data, c.evaluation.sets
    if data.eval_path is not None and HELD_OUT in sets:
        yield (
            "evaluation.sets.held_out: data.eval_path is the set of that name. Rename the set, or "
            "leave data.eval_path out"
        )
    for name, held_out in sets.items():
        place = f"evaluation.sets.{name}"
        needing = [f for f in held_out.reward or () if f in BUILT_IN_REWARDS]
        if held_out.prompt_field is not None and data.prompt_template is not None:
            yield (
                f"{place}.prompt_field has no effect beside data.prompt_template, which makes the "
                "prompts of every set: remove one of them"
            )
        if held_out.answer_field is not None and data.answer_field is None:
            yield f"{place}.answer_field: rewards get no answer. Set data.answer_field as well"
        if needing and data.answer_field is None:
            yield (
                f"{place}.reward: {needing[0]} compares with the answer. Set data.answer_field, or "
                "choose another reward"
            )
    if c.evaluation.best_metric is not None:
        yield from _best_metric(c, c.evaluation.best_metric)


def _best_metric(c: Config, wanted: str) -> Iterator[str]:
    samples = {name: held_out.samples for name, held_out in sorted(c.evaluation.sets.items())}
    if c.data.eval_path is not None:
        samples = {HELD_OUT: 1, **samples}
    name, _, metric = wanted.partition("/")
    place = f"evaluation.best_metric = {wanted!r}"
    if not samples:
        yield (
            f"{place}: the run has no evaluation. Set data.eval_path, or add a table "
            "[evaluation.sets.NAME]"
        )
    elif name not in samples:
        meant = did_you_mean(name, samples) or f"Name one of {', '.join(samples)}, as SET/METRIC"
        yield f"{place}: there is no set {name!r}. {meant.rstrip()}"
    elif metric not in (metrics := row_metrics(samples[name])):
        named = ", ".join(f"{name}/{known}" for known in metrics)
        yield (
            f"{place}: with samples = {samples[name]} the set has no such metric. Name one of "
            f"{named}, or raise samples"
        )


def _recorded(c: Config) -> Iterator[str]:
    if not c.recorded:
        return
    for setting, what in SAMPLED.items():
        section, _, name = setting.rpartition(".")
        fields = attrgetter(section)(c)
        value = getattr(fields, name)
        if value != type(fields).model_fields[name].get_default(call_default_factory=True):
            yield f'{setting} {what}: remove it if rollout.source = "recorded"'
    if c.train.algorithm in ("grpo", "online_dpo"):
        yield (
            f'train.algorithm = "{c.train.algorithm}" needs completions that the policy samples, '
            'and rollout.source = "recorded" has none: choose another one (docs/recorded-data.md)'
        )


def _recorded_fields(c: Config) -> Iterator[str]:
    named = [name for name in _FIELDS if getattr(c.data, f"{name}_field") is not None]
    ways = [name for name in ("messages", "completion", "chosen") if name in named]
    if not c.recorded:
        if c.built_in and not c.built_in.samples and not named:
            yield (
                f'train.algorithm = "{c.train.algorithm}" trains recorded data: set rollout.source '
                '= "recorded"'
            )
        if named:
            yield f'data.{named[0]}_field has no effect unless rollout.source = "recorded"'
        return
    for name in named:
        if (other := _NEEDED.get(name)) is not None and other not in named:
            yield f"data.{name}_field needs data.{other}_field: set it as well"
    if not ways:
        yield f'rollout.source = "recorded" needs the field with the completions: set {NAME_ONE}'
    if len(ways) > 1:
        yield f"data.{ways[0]}_field and data.{ways[1]}_field: a row has one form. Set {NAME_ONE}"
    for name in ("prompt_template", "prompt_suffix"):
        if c.data.row_form is RowForm.CHAT and getattr(c.data, name):
            yield (
                f"data.{name} has no effect on whole chats, which data.messages_field names: "
                "remove it, and put its text into the messages"
            )


def _recorded_form(c: Config) -> Iterator[str]:
    form = c.data.row_form
    if not c.recorded or form is None:
        return
    if c.built_in is not None and c.built_in.forms and form not in c.built_in.forms:
        yield (
            f'train.algorithm = "{c.train.algorithm}" does not train rows of the form {form}: set '
            f"the fields of {' or '.join(c.built_in.forms)}: {NAME_ONE}"
        )
    if c.rollout.group_size != form.completions:
        yield (
            f"rollout.group_size = {c.rollout.group_size}, but a row of the form {form} gives "
            f"{form.completions}: leave rollout.group_size out"
        )


def _terms(c: Config) -> Iterator[str]:
    if missing := [f"train.loss.{name}" for name in ignored(c.train) if name in TERMS]:
        yield (
            f"{' and '.join(missing)}: train.algorithm = {c.train.algorithm} has no such term in "
            "its loss. Remove it, or choose another algorithm (docs/algorithms.md)"
        )


def _answers(c: Config) -> Iterator[str]:
    # An environment may score its samples itself; reward.functions are then not called.
    scored = c.rollout.environment is None and not c.recorded
    for name in c.reward.functions:
        if c.data.answer_field is None and scored and name in BUILT_IN_REWARDS:
            yield (
                f"{name} compares with the answer: set data.answer_field, or choose other "
                "reward.functions"
            )


def _filtered(c: Config) -> Iterator[str]:
    reasons = {
        "distillation uses no rewards": c.train.algorithm == "distill",
        "kto learns from each completion alone": c.train.algorithm == "kto",
        "those of a group of one (rollout.group_size = 1) always are": _alone(c),
        "train.loss.advantage = step compares them with the rest of the step": (
            c.train.loss.advantage == "step"
        ),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if c.train.filter_uninformative and reason is not None:
        yield (
            f"train.filter_uninformative drops groups whose rewards are all equal, and {reason}: "
            "set it to false"
        )


def _pairs(c: Config) -> bool:
    return issubclass(c.built_in.options, PairOptions) if c.built_in else False


def _alone(c: Config) -> bool:
    """Groups of one completion, which the objective compares with others."""
    learns = c.built_in is not None and c.built_in.groups_of_one
    return c.rollout.group_size == 1 and not c.recorded and not learns


def _turns(c: Config) -> Iterator[str]:
    fleet, setting = c.fleet, f'fleet.sharing = "{c.fleet.sharing}"'
    lends = fleet.sharing == "lend"
    if fleet.training_pairs is not None and not lends:
        yield 'fleet.training_pairs has no effect without fleet.sharing = "lend": remove it'
    if not c.takes_turns:
        return
    if c.recorded:
        yield (
            f"{setting} is for engines that generate, and a run of recorded data has none: its "
            'rollout workers need no device. Write fleet.sharing = "none"'
        )
    if fleet.rollout_spares:
        yield (
            f"fleet.rollout_spares: with {setting} a spare would hold a device on which it may not "
            "generate. Set it to 0"
        )
    if lends and fleet.policy < 2:
        yield (
            f"{setting} moves devices between training and generation, and with one pair there is "
            'none to move. Write fleet.sharing = "turns", or more pairs (fleet.policy and '
            "fleet.rollout)"
        )
    if lends and fleet.policy <= (fleet.training_pairs or 1):
        yield (
            f"fleet.training_pairs = {fleet.training_pairs} leaves none of {fleet.policy} pairs "
            "to generate: set it lower"
        )
    if lends and c.train.max_staleness == 0:
        yield (
            f"{setting}: with train.max_staleness = 0 one side always waits for the other. Write "
            'fleet.sharing = "turns", or train.max_staleness = 1'
        )
    if fleet.policy != fleet.rollout:
        yield (
            f"{setting} pairs policy replica N with rollout worker N, and fleet.policy = "
            f"{fleet.policy}, fleet.rollout = {fleet.rollout}: make them equal"
        )
    if fleet.autoscale:
        yield (
            f"{setting}: the autoscaler changes one of the two numbers, and they are pairs. Set "
            "fleet.autoscale = false"
        )
    if fleet.provider in ("kubernetes", "ray"):
        yield (
            f"{setting} needs both workers of a pair on one device, which pods and actors do not "
            'share. Set fleet.provider = "local" (`paceline up`, `paceline node`)'
        )


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _objective,
    _scorers,
    _evaluation,
    _recorded,
    _recorded_fields,
    _recorded_form,
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
        lambda c: c.train.memory.offload_activations and not c.model.recomputes,
        "train.memory.offload_activations moves what gradient checkpointing keeps, and "
        "model.gradient_checkpointing is not true. Set model.gradient_checkpointing = true",
    ),
    Rule(
        lambda c: c.model.lora and c.model.lora.path and c.model.initial_checkpoint,
        "model.lora.path and model.initial_checkpoint both give the adapters with which the run "
        "begins: remove one of them",
    ),
    Rule(
        lambda c: (
            c.rollout.router_replay
            and (c.recorded or c.rollout.engine not in ("transformers", "vllm"))
        ),
        "rollout.router_replay needs completions of an engine that notes the experts that it "
        'chose: set it to false, or rollout.engine to "transformers" or "vllm"',
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
        lambda c: (
            _alone(c)
            and c.train.algorithm in FAMILY
            and c.train.loss.advantage != "step"
            and c.train.loss.kl_coef == 0
        ),
        "rollout.group_size = 1: an advantage is relative to the other completions of the prompt, "
        "so it is always 0 and nothing is learnt. Set it to 2 or more, or train.algorithm = ppo",
    ),
    _filtered,
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
        lambda c: c.weights.url is not None and c.rollout.relay_fanout not in ("auto", 0),
        "rollout.relay_fanout = {c.rollout.relay_fanout}: through weights.url nobody sends weights "
        "to anybody. Remove one of the two",
    ),
    Rule(
        lambda c: c.fleet.heartbeat_s * 2 > c.fleet.lease_ttl_s,
        "fleet.lease_ttl_s must be at least twice fleet.heartbeat_s",
    ),
    _turns,
    _answers,
)
"""The first that a config breaks is reported."""
