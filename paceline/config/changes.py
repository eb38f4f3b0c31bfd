"""Changes of a run's settings: which are allowed, when, and what to do otherwise.

The rule of a setting is on its field in the schema: see ``Change``.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from paceline.config.fields import OBJECTIVE, AtStart, Change, Fixed, Live
from paceline.config.schema import SECTIONS, SETTINGS, Config
from paceline.config.sections.scorers import ScorerConfig

NEW_RUN = (
    "Start a new run with the weights of a checkpoint: paceline up CONFIG --from CHECKPOINT "
    "--set {}=..."
)


def refusal(name: str) -> str:
    """The reason why ``paceline set`` refuses it, and the way that works; empty if it is Live."""
    match change_of(name):
        case Live():
            return ""
        case AtStart() if name in ("fleet.policy", "fleet.rollout", "fleet.scorers"):
            role = name.partition(".")[2].replace("scorers", "scorer:NAME")
            return f"{name} is the number at the start. Use paceline scale {role}=COUNT"
        case AtStart():
            return (
                f"{name} is read when a process starts. Interrupt paceline up, and continue the "
                f"run with --set {name}=..."
            )
        case Fixed(reason):
            return f"{name} is fixed for the run: {reason}. {NEW_RUN.format(name)}"


def change_of(name: str) -> Change:
    """The rule of a setting by its dotted name. The settings of all scorers have the same rules."""
    section, _, field = name.rpartition(".")
    if name.startswith("scorers."):
        return ScorerConfig.change_of(field)
    return SECTIONS[section].change_of(field) if section in SECTIONS else Fixed(OBJECTIVE)


def values_of(config: Config, *changes: type[Change]) -> dict[str, Any]:
    """The settings under ``changes`` by dotted name, as JSON values."""
    return {
        name: value
        for name, value in flat_settings(config.model_dump(mode="json"))
        if isinstance(change_of(name), changes)
    }


def flat_settings(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name, from nested sections. Those of scorers are sections as well."""
    for name, value in values.items():
        dotted = f"{path}{name}"
        if isinstance(value, Mapping) and (dotted in SECTIONS or path == "scorers."):
            yield from flat_settings(value, f"{dotted}.")
        else:
            yield dotted, value


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """``config`` with ``settings``, validated. Raises pydantic's ValidationError."""
    known = config.model_dump(mode="json")
    sections: dict[str, Any] = {name: getattr(config, name) for name in known}
    for dotted, value in settings.items():
        section, *tables, name = dotted.split(".")
        fields = known.get(section, {})
        for table in tables:
            fields = fields.get(table) or {}
        if name in fields and fields[name] != value:
            fields[name] = value
            sections[section] = known[section]
    return Config.model_validate(sections)


def problem_of_change(built: Config, before: Config, now: Config) -> str:
    """The reason why a running run cannot go from ``before`` to ``now``; empty if it can.
    ``built``: the config with which its processes started."""
    most, wanted = built.rollout.max_tokens, now.rollout.max_tokens
    if wanted > most:
        return (
            f"rollout.max_tokens = {wanted}: engines were built for at most {most}. "
            + NEW_RUN.format("rollout.max_tokens")
        )
    return problem_of_divisor(before, now)


def problem_of_divisor(before: Config, now: Config) -> str:
    """The reason why the loss of a run cannot go on from ``before`` to ``now``; empty if it can."""
    if (
        now.train.loss.aggregation != "dr_grpo"
        or now.longest_completion == before.longest_completion
    ):
        return ""
    name = f"rollout.{now.length_setting}"
    return (
        f"{name} = {now.longest_completion}: with train.loss.aggregation = dr_grpo it is the "
        "divisor of the loss, and "
        f"the run has {before.longest_completion}. " + NEW_RUN.format(name)
    )


def differences(ours: str, theirs: str) -> str:
    """The fields that differ between two canonical configs: the run's value, then the other's."""
    try:
        run, other = json.loads(ours), json.loads(theirs)
        names = sorted(n for n in run | other if run.get(n) != other.get(n))
    except (ValueError, AttributeError, TypeError):
        return "one of them cannot be read"
    if any(name in SECTIONS for name in names):
        return "another release wrote one of them; finish the run with that release"
    told = [
        f"{name} is {run.get(name, default_of(name))!r} in the run, "
        f"{other.get(name, default_of(name))!r} here"
        for name in names[:8]
    ]
    return "; ".join(told) or "its digest"


def default_of(name: str) -> Any:
    """The default of a setting by its dotted name, as JSON value; None if it has none."""
    info = SETTINGS.get(name)
    if info is None or info.is_required():
        return None
    return to_jsonable_python(info.get_default(call_default_factory=True))
