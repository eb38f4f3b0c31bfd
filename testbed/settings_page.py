"""Generator of docs/configuration.md from the schema's field texts.

python -m testbed.settings_page > docs/configuration.md
"""

import json
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from paceline.config.fields import CARRIED, Section, meaning, section_of
from paceline.config.objectives import BUILT_IN
from paceline.config.schema import SECTIONS, TABLES
from paceline.config.sections.scorers import ScorerConfig, ScorersConfig

HEAD = """\
# Settings

<!-- Written by `make docs` from paceline/config/. Change the field's text there. -->

A run is described by one TOML file. `--set section.field=value` on the command line overrides any
setting; the value is parsed as TOML, or taken as plain text if that fails. Unknown settings are
refused. `paceline config check FILE --resolved` prints all of them.

TOML has no null: `"none"` unsets a setting whose type below allows none. A leading `~` of a path is
the home directory.
"""


def reference() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD]
    for section, model in SECTIONS.items():
        parts.append(f"\n## [{section}]\n\n")
        if model is ScorersConfig:
            parts.append(f"{model.__doc__}\n\n### [scorers.NAME]\n\n")
            model = ScorerConfig
        if not model.model_fields:
            parts.append(f"{model.__doc__}\n")
            continue
        parts += _table(model)
        for name in model.model_fields:
            if (table := TABLES.get(f"{section}.{name}")) is not None:
                about = " ".join((table.__doc__ or "").split())
                parts += [f"\n### [{section}.{name}.NAME]\n\n{about}\n\n", *_table(table)]
    for algorithm, entry in BUILT_IN.items():
        if entry.options.model_fields:
            parts.append(f'\n### [objective] of train.algorithm = "{algorithm}"\n\n')
            parts += _table(entry.options)
    return "".join(parts)


def _table(model: type[Section]) -> list[str]:
    head = "| setting | type | default | meaning |\n|---|---|---|---|\n"
    settings = {n: f for n, f in model.model_fields.items() if section_of(f) is None}
    return [head, *(_row(name, field) for name, field in settings.items())]


def _row(name: str, field: FieldInfo) -> str:
    text = meaning(field).replace("|", "\\|")
    return f"| `{name}` | {_type(field)} | {_default(field)} | {text} |\n"


def _type(field: FieldInfo) -> str:
    limits = []
    for item in field.metadata:
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            bound = getattr(item, attribute, None)
            if bound is not None and bound != CARRIED:
                limits.append(f"{sign} {bound}")
    return " ".join([_name(field.annotation), ", ".join(limits)]).strip()


def _name(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inner)
    if origin is list:
        return f"list of {_name(inner[0])}"
    if origin is dict:
        tables = isinstance(inner[1], type) and issubclass(inner[1], Section)
        return f"table of {_name(inner[1])}" if inner[1] is not Any and not tables else "table"
    if origin is tuple:
        return f"[{', '.join(_name(item) for item in inner)}]"
    if hasattr(annotation, "__metadata__"):
        return _name(inner[0])
    if inner:
        return " or ".join("none" if item is type(None) else _name(item) for item in inner)
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}
    return names.get(getattr(annotation, "__name__", ""), str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    return "none" if default is None else f"`{json.dumps(default)}`"


if __name__ == "__main__":
    print(reference(), end="")
