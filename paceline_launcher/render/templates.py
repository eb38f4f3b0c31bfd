"""Jinja templates of rendered files. Values go through the filters ``yaml`` and ``sh``, which quote
them; ``nested`` puts a text of several lines under the line it stands in."""

import re
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any

import jinja2
import tomli_w
import yaml

from paceline.config.fields import Section
from paceline.config.load import to_toml
from paceline.config.schema import Config
from paceline.config.sections.scorers import ScorerConfig, ScorersConfig
from paceline.errors import BadInput
from paceline_launcher.render.request import RenderRequest


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def _yaml(value: object) -> str:
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return text.removesuffix("...\n").rstrip("\n")


def _nested(text: str, columns: int) -> str:
    return re.sub(r"\n(?=.)", "\n" + " " * columns, text.strip("\n"))


class Templates:
    """The templates of one target."""

    def __init__(self, request: RenderRequest, **context: Any) -> None:
        loaders: list[jinja2.BaseLoader] = [jinja2.PackageLoader("paceline_launcher.render")]
        if request.options.templates is not None:
            loaders.insert(0, jinja2.FileSystemLoader(request.options.templates))
        self._environment = jinja2.Environment(
            loader=jinja2.ChoiceLoader(loaders),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        self._environment.filters |= {"yaml": _yaml, "sh": shlex.quote, "nested": _nested}
        known = {"run": request, "options": request.options, "config": request.config}
        self._environment.globals |= known | context

    def text(self, name: str, **context: Any) -> str:
        """The template NAME.j2, filled. Raises BadInput if an edited one is wrong."""
        try:
            text = self._environment.get_template(f"{name}.j2").render(context)
        except jinja2.TemplateSyntaxError as error:
            raise BadInput(f"--templates: {error.name}, line {error.lineno}: {error}") from error
        except jinja2.TemplateError as error:
            raise BadInput(f"--templates: {name}.j2: {error}") from error
        # Plain scripts say for shellcheck which shell they are for; rendered ones have a first
        # line.
        return re.sub(r"^# shellcheck shell=\w+\n", "", text.lstrip("\n"), flags=re.MULTILINE)


END_OF_FILE = "END_OF_RUN_TOML"


def run_file(
    config: Config, changes: Mapping[str, Mapping[str, Any]], *, with_token_file: bool = False
) -> str:
    """TOML of ``config`` with ``changes`` (section, field, value), without defaults and secrets."""
    changed = with_changes(with_changes(config, changes), {"redis": {"url": None}})
    if not with_token_file:
        changed = with_changes(changed, {"auth": {"token_file": None}})
    sections = _not_default(tomllib.loads(to_toml(changed)), changed)
    return tomli_w.dumps(sections, multiline_strings=True)


def _not_default(values: Mapping[str, Any], section: Section) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in values.items():
        info, now = type(section).model_fields.get(name), getattr(section, name, None)
        if isinstance(now, ScorersConfig):
            value = {scorer: _scorer(table) for scorer, table in value.items()}
        elif isinstance(now, Section):
            value = _not_default(value, now)
        if isinstance(now, Section):
            changed |= {name: value} if value else {}
        elif info is None or now != info.get_default(call_default_factory=True):
            changed[name] = value
    return changed


def script_run_file(
    config: Config, changes: dict[str, dict[str, Any]], *, with_token_file: bool = False
) -> str:
    """The run file in a shell script, which adds the address of a user's Redis. Raises BadInput."""
    if config.redis.url is not None:
        # The others are settings of a server that Paceline starts.
        changes = {**changes, "redis": type(config.redis)().model_dump()}
    text = run_file(config, changes, with_token_file=with_token_file)
    if END_OF_FILE in text.splitlines():
        raise BadInput(f"a setting contains the line {END_OF_FILE}, which ends the run file")
    return text


def _scorer(table: Mapping[str, Any]) -> dict[str, Any]:
    default = {name: info.default for name, info in ScorerConfig.model_fields.items()}
    given = ScorerConfig.model_validate(table)
    return {name: v for name, v in table.items() if getattr(given, name) != default[name]}


def with_changes(config: Config, changes: Mapping[str, Mapping[str, Any]]) -> Config:
    updated = {
        name: getattr(config, name).model_copy(update=dict(new)) for name, new in changes.items()
    }
    return config.model_copy(update=updated)
