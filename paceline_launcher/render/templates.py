"""Jinja templates of rendered files. Values go through the filters ``yaml`` and ``sh``, which quote
them; ``nested`` puts a text of several lines under the line it stands in."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

import jinja2
import tomli_w
import yaml

from paceline.config.fields import AS_TOML
from paceline.config.schema import Config
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
    """TOML of ``config`` with ``changes`` (section, field, value), without defaults and secrets.
    Processes and scripts add the address of a user's Redis. Raises BadInput."""
    if config.redis.url is not None:
        # The others are settings of a server that Paceline starts.
        changes = {**changes, "redis": type(config.redis)().model_dump()}
    for section, values in changes.items():
        config = with_changes(config, section, values)
    config = with_changes(config, "redis", {"url": None})
    if not with_token_file:
        config = with_changes(config, "auth", {"token_file": None})
    written = config.model_dump(mode="json", context=AS_TOML, exclude_defaults=True)
    text = tomli_w.dumps(written, multiline_strings=True)
    if END_OF_FILE in text.splitlines():
        raise BadInput(f"a setting contains the line {END_OF_FILE}, which ends the run file")
    return text


def with_changes(config: Config, section: str, values: Mapping[str, Any]) -> Config:
    changed = getattr(config, section).model_copy(update=dict(values))
    return config.model_copy(update={section: changed})
