"""Configuration templates of `paceline init`: templates.toml, commented with the schema's texts."""

import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import tomli_w
from pydantic.fields import FieldInfo

from paceline.config.fields import meaning
from paceline.config.objectives import BUILT_IN
from paceline.config.schema import SECTIONS

WIDTH = 98
LORA_LR = 10
"""Learning rate of adapters over that of whole weights: Schulman et al., LoRA Without Regret, 2025.
"""
NARROW_LORA_LR = 2.5
"""The same for the tiny model: the first steps change narrow layers more."""
Table = dict[str, Any]
STARTS = ("start", "recorded_start")

_TEMPLATES = tomllib.loads(
    resources.files("paceline.config").joinpath("templates.toml").read_text("utf-8")
)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    both = {**base, **over}
    tables = {name for name in base.keys() & over.keys() if isinstance(over[name], Mapping)}
    return both | {name: _merged(base[name], over[name]) for name in tables}


def _size(name: str) -> Table:
    fields = _TEMPLATES["size"][name]
    return _merged(_size(fields["like"]), fields) if "like" in fields else fields


ALGORITHMS: dict[str, Table] = _TEMPLATES["algorithm"]
SIZES: dict[str, Table] = {name: _size(name) for name in _TEMPLATES["size"]}
"""Tables as the head of templates.toml describes them."""


def template(algorithm: str, size: str, out: str, *, lora: bool = False) -> str:
    """A commented TOML file, whose path will be ``out``. Raises KeyError for an unknown choice."""
    chosen, base = ALGORITHMS[algorithm], _base(size, lora)
    settings = template_settings(algorithm, size, lora=lora)
    known = BUILT_IN[settings["train"]["algorithm"]].options.model_fields
    sampled = "" if "rows" in chosen else base.get("sampled", "")
    head = [
        *_comment(f"{chosen['summary']}."),
        *_comment(f"Sized for {base['summary']}{sampled}."),
        "#",
        *(f"#     {line}" for line in commands(algorithm, size, out, lora=lora)),
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


def commands(algorithm: str, size: str, out: str, *, lora: bool = False) -> list[str]:
    start = "recorded_start" if "rows" in ALGORITHMS[algorithm] else "start"
    return [line.format(out=out) for line in _base(size, lora)[start]]


def _base(size: str, lora: bool) -> Table:
    base = SIZES[size]
    special = base.get("lora", {}) if lora else {}
    if "like" in special:  # it is started as another size
        special = {name: SIZES[special["like"]][name] for name in STARTS} | special
    return _merged(base, special)


def template_settings(algorithm: str, size: str, *, lora: bool = False) -> Table:
    """Fields by section: those of the size, and before them those of the algorithm."""
    chosen, base = ALGORITHMS[algorithm], _base(size, lora)
    settings = base["settings"]
    if "rows" in chosen:
        settings = _without_engine(settings, base["rows"][chosen["rows"]])
    of_algorithm = {name: chosen[name] for name in SECTIONS if name in chosen}
    for special in (of_algorithm, base.get("algorithm", {}).get(algorithm, {})):
        settings = _merged(settings, special)
    settings["train"] = {"algorithm": "grpo", **settings["train"]}
    if lora:
        factor = NARROW_LORA_LR if size == "tiny" else LORA_LR
        lr = float(f"{factor * settings['train']['optimizer']['lr']:.3g}")
        rate = {"train": {"optimizer": {"lr": lr}}}
        settings = _merged(_merged(settings, _TEMPLATES["lora"]), rate)
    return {name: settings[name] for name in SECTIONS if name in settings}


def _without_engine(settings: Table, data: Table) -> Table:
    """A run of recorded rows: one rollout worker tokenises them, on no GPU."""
    rollout = {"source": "recorded", "max_tokens": settings["rollout"]["max_tokens"]}
    found = {**settings, "data": data, "rollout": rollout}
    del found["reward"]
    on_no_gpu = {
        "fleet": {"rollout": 1},
        **({"ray": {"rollout_gpus": 0}} if "ray" in found else {}),
    }
    return _merged(found, on_no_gpu)


def _tables(settings: Table) -> Iterator[tuple[str, Table]]:
    for section in SECTIONS:
        fields: Any = settings
        for name in section.split("."):
            fields = fields.get(name, {})
        plain = {n: value for n, value in fields.items() if f"{section}.{n}" not in SECTIONS}
        if plain:
            yield section, plain


def _section(section: str, fields: Table, known: Mapping[str, FieldInfo]) -> str:
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
