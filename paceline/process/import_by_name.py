"""Functions that a config names as ``package.module:function``."""

from __future__ import annotations

import importlib
from typing import Any

from paceline.errors import one_line
from paceline.process.user_code import hidden_file, search_start_directory_last


class NotFound(Exception):
    """There is no function of this name; the message says which part of the name was not found."""


def find(name: str) -> Any:
    """The function that ``package.module:function`` names. Raises NotFound, with one line.

    A module of the start directory is found after every installed one.
    """
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise NotFound("it must have the form package.module:function")
    search_start_directory_last()
    # The user's module may fail in any way while it is imported.
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        why = f"cannot import {module_name}: {one_line(error)}"
        missing = isinstance(error, ModuleNotFoundError)
        raise NotFound(why + _hint(module_name, missing=missing)) from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise NotFound(f"{module_name} has no {attribute!r}{_hint(module_name)}")
        target = getattr(target, part)
    if not callable(target):
        raise NotFound("it is not a function")
    return target


def _hint(module_name: str, *, missing: bool = False) -> str:
    hidden = hidden_file(module_name)
    if hidden:
        return f". An installed module of the same name hides {hidden}: rename that file"
    return ". Is it installed, or in the directory you start from?" if missing else ""
