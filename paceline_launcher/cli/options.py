"""Command lines from signatures and docstrings.

A positional parameter of a command is an argument, and a keyword-only one is an option. The lines
below ``Args:`` in its docstring describe them, as ``name [--flag ...] [METAVAR]: text``. A
parameter whose type is a dataclass stands for the options that its fields are. Limits and parsers
are in ``Annotated``, as typer takes them.
"""

import copy
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args

import typer
from typer.models import ParameterInfo

ENTRY = re.compile(r"(\w+)((?: -[\w-]+)*)(?: (.+?))?: (.+)")


def command_line(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` as typer reads it, with the first part of its docstring as its help."""
    text, described = _described(command)
    kinds: dict[str, Any] = {p.name: p.annotation for p in described if is_dataclass(p.annotation)}
    options = {name: _described(kind)[1] for name, kind in kinds.items()}
    parameters = [p for p in described if p.name not in kinds]
    parameters += [p for group in options.values() for p in group]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, kind in kinds.items():
            given[name] = kind(**{p.name: given.pop(p.name) for p in options[name]})
        command(**given)

    # typer reads all three.
    run.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # the terminal's width wraps paragraphs
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _described(command: Callable[..., Any]) -> tuple[str, list[inspect.Parameter]]:
    """Help and parameters of a command, or of a dataclass whose fields are options."""
    text, _, lines = (inspect.getdoc(command) or "").partition("\n\nArgs:\n")
    entries: dict[str, tuple[str, str, str]] = {}
    for line in re.sub(r"\n {8,}", " ", lines).splitlines():
        if found := ENTRY.fullmatch(line.strip()):
            entries[found[1]] = found[2], found[3], found[4]
    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if (entry := entries.pop(parameter.name, None)) is not None:
            parameter = parameter.replace(annotation=_annotated(parameter, *entry))
        parameters.append(parameter)
    assert not entries, f"{command.__name__} has no parameters {', '.join(entries)}"
    return text, parameters


def _annotated(parameter: inspect.Parameter, flags: str, metavar: str, text: str) -> Any:
    kind, *given = get_args(parameter.annotation) or (parameter.annotation,)
    if not given or not isinstance(given[0], ParameterInfo):
        kind, given = parameter.annotation, []
    is_option = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    info = copy.copy(given[0]) if given else typer.Option() if is_option else typer.Argument()
    info.help = text
    info.metavar = metavar or info.metavar
    if is_option:
        info.default = ...  # typer takes a first flag for it
        info.param_decls = flags.split() or [f"--{parameter.name.replace('_', '-')}"]
    return Annotated[kind, info]
