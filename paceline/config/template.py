"""Configuration templates of `paceline init`, by algorithm and model size.

The settings are in templates.toml. The comments are the schema's field texts, as in
docs/configuration.md.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import tomli_w

from paceline.config.fields import meaning
from paceline.config.schema import SECTIONS

WIDTH = 98


@dataclass(frozen=True, slots=True)
class Algorithm:
    summary: str
    train: Mapping[str, Any]
    """The settings of [train] that define it."""


@dataclass(frozen=True, slots=True)
class Size:
    summary: str
    start: list[str]
    """Commands that start a run; {out} is the file."""
    settings: Mapping[str, Mapping[str, Any]]


_TEMPLATES = tomllib.loads(
    resources.files("paceline.config").joinpath("templates.toml").read_text("utf-8")
)
ALGORITHMS = {name: Algorithm(**fields) for name, fields in _TEMPLATES["algorithm"].items()}
SIZES = {name: Size(**fields) for name, fields in _TEMPLATES["size"].items()}


def template(algorithm: str, size: str, out: str) -> str:
    """A commented TOML file that ``load_config`` reads. Raises KeyError for an unknown choice.

    ``out``: path of the file, for the commands that it shows.
    """
    chosen, base = ALGORITHMS[algorithm], SIZES[size]
    settings = {section: dict(fields) for section, fields in base.settings.items()}
    settings["train"] = {"algorithm": "grpo", **settings["train"], **chosen.train}
    head = [
        *_comment(f"{chosen.summary}."),
        *_comment(f"Sized for {base.summary}."),
        "#",
        *(f"#     {line.format(out=out)}" for line in base.start),
        "#",
        *_comment(
            "docs/configuration.md lists all settings. Settings not in this file have defaults."
        ),
    ]
    parts = ["\n".join(head), *(_section(name, fields) for name, fields in settings.items())]
    return "\n\n".join(parts) + "\n"


def _section(section: str, fields: Mapping[str, Any]) -> str:
    """A section as TOML, with the meaning of each setting above it."""
    known = SECTIONS[section].model_fields
    lines = []
    for line in tomli_w.dumps({section: fields}).splitlines():
        name = re.match(rf"(?:\[{section}\.)?(\w+)(?: =|\]$)", line)
        if name and name[1] in known:
            lines += _comment(meaning(known[name[1]]))
        lines.append(line)
    return "\n".join(lines)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
