"""Configuration templates of `paceline init`: templates.toml, commented with the schema's texts."""

import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo

from paceline.config.fields import meaning
from paceline.config.objectives import BUILT_IN
from paceline.config.schema import SECTIONS

WIDTH = 98
Settings = Mapping[str, Mapping[str, Any]]
"""Fields by section."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    summary: str
    train: Mapping[str, Any]
    """The settings of [train] that define it."""
    rows: str = "prompts"
    """Prompts, for which the policy samples, or recorded chats or pairs."""
    objective: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recorded(self) -> bool:
        return self.rows != "prompts"

    @property
    def settings(self) -> Settings:
        return {"train": self.train, "objective": self.objective, "rollout": self.rollout}


@dataclass(frozen=True, slots=True)
class Size:
    summary: str
    start: list[str]
    """Commands that start a run; {out} is the file."""
    recorded_start: list[str]
    """The same for a run without an engine."""
    settings: Settings
    """Settings of a run of prompts."""
    rows: Mapping[str, Mapping[str, Any]]
    """[data] of recorded rows, by their kind."""
    sampled: str = ""
    """Addition to the summary for a run with an engine."""
    algorithm: Mapping[str, Settings] = field(default_factory=dict)
    """Settings of an algorithm at this size."""


_TEMPLATES = tomllib.loads(
    resources.files("paceline.config").joinpath("templates.toml").read_text("utf-8")
)


def _with_defaults(name: str) -> dict[str, Any]:
    fields = dict(_TEMPLATES["size"][name])
    if (base := fields.pop("like", None)) is None:
        return fields
    return _merged(_with_defaults(base), fields)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {**base, **over}
    tables = {name for name in base.keys() & over.keys() if isinstance(over[name], Mapping)}
    return both | {name: _merged(base[name], over[name]) for name in tables}


ALGORITHMS = {name: Algorithm(**fields) for name, fields in _TEMPLATES["algorithm"].items()}
SIZES = {name: Size(**_with_defaults(name)) for name in _TEMPLATES["size"]}


def template(algorithm: str, size: str, out: str) -> str:
    """A commented TOML file, whose path will be ``out``. Raises KeyError for an unknown choice."""
    chosen, base = ALGORITHMS[algorithm], SIZES[size]
    settings = template_settings(algorithm, size)
    known = BUILT_IN[settings["train"]["algorithm"]].options.model_fields
    head = [
        *_comment(f"{chosen.summary}."),
        *_comment(f"Sized for {base.summary}{'' if chosen.recorded else base.sampled}."),
        "#",
        *(f"#     {line}" for line in commands(algorithm, size, out)),
        "#",
        *_comment(
            "docs/configuration.md lists all settings. Settings not in this file have defaults."
        ),
    ]
    parts = ["\n".join(head)]
    for name, fields in _tables(settings):
        info = known if name == "objective" else SECTIONS[name].model_fields
        parts.append(_section(name, fields, info))
    return "\n\n".join(parts) + "\n"


def commands(algorithm: str, size: str, out: str) -> list[str]:
    base = SIZES[size]
    lines = base.recorded_start if ALGORITHMS[algorithm].recorded else base.start
    return [line.format(out=out) for line in lines]


def template_settings(algorithm: str, size: str) -> dict[str, dict[str, Any]]:
    """Fields by section: those of the size, and before them those of the algorithm."""
    chosen, base = ALGORITHMS[algorithm], SIZES[size]
    settings = {section: dict(fields) for section, fields in base.settings.items()}
    if chosen.recorded:
        settings = _without_engine(settings, base.rows[chosen.rows])
    settings["train"] = {"algorithm": "grpo", **settings["train"]}
    for special in (chosen.settings, base.algorithm.get(algorithm, {})):
        settings = _merged(settings, {name: fields for name, fields in special.items() if fields})
    return {name: settings[name] for name in SECTIONS if name in settings}


def _without_engine(
    settings: dict[str, dict[str, Any]], data: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """A run of recorded rows: one rollout worker tokenises them, on no GPU."""
    longest = settings["rollout"]["max_tokens"]
    found = {
        **settings,
        "data": dict(data),
        "rollout": {"source": "recorded", "max_tokens": longest},
        "fleet": settings["fleet"] | {"rollout": 1},
    }
    del found["reward"]
    if "ray" in found:
        found["ray"] = found["ray"] | {"rollout_gpus": 0}
    return found


def _tables(settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    for section in SECTIONS:
        fields: Mapping[str, Any] = settings
        for name in section.split("."):
            fields = fields.get(name, {})
        plain = {n: value for n, value in fields.items() if f"{section}.{n}" not in SECTIONS}
        if plain:
            yield section, plain


def _section(section: str, fields: Mapping[str, Any], known: Mapping[str, FieldInfo]) -> str:
    """A section as TOML, with the meaning of each setting above it."""
    lines = []
    for line in tomli_w.dumps({"": fields}).splitlines():
        line = line.replace('[""', f"[{section}", 1) if line.startswith('[""') else line
        name = re.match(rf"(?:\[{section}\.)?(\w+)(?: =|\]$)", line)
        if name and name[1] in known:
            lines += _comment(meaning(known[name[1]]))
        lines.append(line)
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
