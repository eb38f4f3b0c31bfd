"""Recorded data: the forms of its rows, by the fields that ``[data]`` names, and what a config of
it needs."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from paceline.config.sections.training import DataConfig
from paceline.config.sections.workers import RolloutConfig


class RowForm(StrEnum):
    """What a row of recorded data holds."""

    CHAT = "chat"  # whole conversations: the assistant's turns are trained
    COMPLETION = "completion"  # a prompt and its completion
    PAIR = "pair"  # the better and the worse one of two completions
    LABELLED = "labelled"  # a prompt, a completion, and whether it is good


GROUP_SIZES = {
    RowForm.CHAT: 1,
    RowForm.COMPLETION: 1,
    RowForm.PAIR: 2,
    RowForm.LABELLED: 1,
}
"""Completions that a row gives."""

FORMS: dict[str, tuple[RowForm, ...]] = {
    "sft": (RowForm.CHAT, RowForm.COMPLETION),
    "reward_model": (RowForm.PAIR,),
    "dpo": (RowForm.PAIR,),
    "ipo": (RowForm.PAIR,),
    "orpo": (RowForm.PAIR,),
    "kto": (RowForm.LABELLED, RowForm.PAIR),
}
"""Built-in objectives that train recorded data, with the forms that they train."""

RECORDED_ALONE = ("sft", "reward_model")
"""Those that train nothing else."""

SAMPLED = ("grpo", "online_dpo")
"""Built-in objectives that need completions of the policy."""

_FIELDS = ("messages", "completion", "chosen", "rejected", "margin", "label")
_NEEDED = {"rejected": "chosen", "chosen": "rejected", "margin": "chosen", "label": "completion"}
_NAME_ONE = (
    "data.messages_field (whole chats), data.completion_field (a completion of data.prompt_field), or "
    "data.chosen_field and data.rejected_field (pairs)"
)


def row_form(data: DataConfig) -> RowForm | None:
    """None: no field of recorded data is named."""
    if data.messages_field is not None:
        return RowForm.CHAT
    if data.chosen_field is not None:
        return RowForm.PAIR
    if data.label_field is not None:
        return RowForm.LABELLED
    return None if data.completion_field is None else RowForm.COMPLETION


def with_group_size(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """``raw``, the sections of a config, with the group size that recorded rows have, unless it
    names one."""
    rollout, data = raw.get("rollout"), raw.get("data")
    if not isinstance(rollout, dict) or rollout.get("source") != "recorded":
        return raw
    if "group_size" in rollout:
        return raw
    named = data if isinstance(data, dict) else data.model_dump() if data is not None else {}
    size = 2 if named.get("chosen_field") not in (None, "none") else 1
    return {**raw, "rollout": {**rollout, "group_size": size}}


def problem_of_recorded(algorithm: str, data: DataConfig, rollout: RolloutConfig) -> str:
    """Why a run cannot train these rows, with the remedy; empty if it can, or if it samples."""
    named = [name for name in _FIELDS if getattr(data, f"{name}_field") is not None]
    if rollout.source != "recorded":
        if named:
            return f'data.{named[0]}_field has no effect unless rollout.source = "recorded"'
        if algorithm in RECORDED_ALONE:
            return f'train.algorithm = "{algorithm}" trains recorded data: set rollout.source = "recorded"'
        return ""
    form = row_form(data)
    if form is None:
        return f'rollout.source = "recorded" needs the field with the completions: set {_NAME_ONE}'
    return (
        _problem_of_fields(named)
        or _problem_of_prompts(form, data)
        or _problem_of_objective(algorithm, form)
        or _problem_of_rollout(form, rollout)
    )


def _problem_of_fields(named: list[str]) -> str:
    for name in named:
        if (other := _NEEDED.get(name)) is not None and other not in named:
            return f"data.{name}_field needs data.{other}_field: set it as well"
    ways = [name for name in ("messages", "completion", "chosen") if name in named]
    if len(ways) > 1:
        return f"data.{ways[0]}_field and data.{ways[1]}_field: a row has one form. Set {_NAME_ONE}"
    return ""


def _problem_of_prompts(form: RowForm, data: DataConfig) -> str:
    if data.long_prompts != "drop":
        return (
            f'data.long_prompts = "{data.long_prompts}": prompts of recorded rows are not truncated. A row whose prompt '
            'is too long is dropped, and counted: set data.long_prompts = "drop", or raise data.max_prompt_tokens'
        )
    for name in ("prompt_template", "prompt_suffix"):
        if form is RowForm.CHAT and getattr(data, name):
            return (
                f"data.{name} has no effect on whole chats, which data.messages_field names: remove it, and put its "
                "text into the messages"
            )
    return ""


def _problem_of_objective(algorithm: str, form: RowForm) -> str:
    if algorithm in SAMPLED:
        return (
            f'train.algorithm = "{algorithm}" needs completions that the policy samples, and '
            'rollout.source = "recorded" has none: choose another one (docs/recorded-data.md)'
        )
    forms = FORMS.get(algorithm, (form,))
    if form not in forms:
        return (
            f'train.algorithm = "{algorithm}" does not train rows of the form {form}: set the fields of '
            f"{' or '.join(forms)}: {_NAME_ONE}"
        )
    return ""


def _problem_of_rollout(form: RowForm, rollout: RolloutConfig) -> str:
    size = GROUP_SIZES[form]
    if rollout.group_size != size:
        return (
            f"rollout.group_size = {rollout.group_size}, but a row of the form {form} gives {size}: "
            "leave rollout.group_size out"
        )
    if rollout.environment is not None:
        return 'rollout.environment needs an engine, and rollout.source = "recorded" has none: remove one'
    if rollout.temperature != 1.0:
        return (
            f"rollout.temperature = {rollout.temperature:g} would scale the log-probs of recorded "
            "completions: leave it at 1"
        )
    return ""
