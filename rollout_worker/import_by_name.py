"""Functions that a config names as ``package.module:function``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


class NotFound(Exception):
    """There is no function of this name; the message says which part of the name was not found."""


def is_import_name(name: str) -> bool:
    module_name, colon, attribute = name.partition(":")
    return bool(colon and module_name and attribute)


def find(name: str) -> Any:
    """The function that ``package.module:attribute`` names. Raises NotFound, with one line.

    The start directory is searched last: a user's ``controller.py`` must not replace Paceline's.
    """
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    # The user's module may fail in any way while it is imported.
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise NotFound(f"cannot import {module_name}: {type(error).__name__}: {line}") from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise NotFound(f"{module_name} has no {attribute!r}")
        target = getattr(target, part)
    if not callable(target):
        raise NotFound("it is not a function")
    return target
