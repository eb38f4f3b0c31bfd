"""User code: module search path of Paceline's processes, and functions that a config names.

A user's ``controller.py`` in the start directory must not replace Paceline's ``controller``. Every
process of ours is therefore started with ``python -P``, which leaves the start directory out, and
adds that directory at the end of ``sys.path`` before it imports a reward or an environment.
"""

import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import did_you_mean, one_line

SAFE_PATH = "PYTHONSAFEPATH"
MOST_TRACEBACK = 8000  # Characters of a traceback, its end


def python_module(module: str) -> tuple[str, ...]:
    """Command line that runs ``module`` of an installed package, never a file of the start
    directory."""
    return (sys.executable, "-P", "-m", module)


def asked() -> Any:
    """Reads the JSON on standard input that says what a check is to try. Its command line says
    nothing of it: every user of the machine can read that."""
    return json.load(sys.stdin)


def search_start_directory_last() -> None:
    """Makes modules of the start directory importable, after every installed one. Idempotent."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and sys.path[:1] in ([""], [here]):
        # `python -m` and `python -c` have put it first.
        del sys.path[0]
    # A source tree that is installed with `pip install -e` is found by an import hook, which comes
    # after all of sys.path. Named on sys.path it comes before the start directory.
    for directory in (str(Path(__file__).resolve().parents[2]), here):
        if directory not in sys.path:
            sys.path.append(directory)


@contextmanager
def safe_path_for_children() -> Iterator[None]:
    """Gives ``-P`` to Python processes that a library starts inside, with a command line of its
    own."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def raised_in(error: BaseException, caller: str) -> tuple[str, str]:
    """An error of a user's code: one line with the error and the innermost place, such as
    "KeyError: 'x' (rewards.py:12 in score)", and a traceback of the frames after the last one in
    the file ``caller``, which called that code."""
    found = traceback.TracebackException(type(error), error, error.__traceback__)
    ours = [i for i, frame in enumerate(found.stack) if frame.filename == caller]
    del found.stack[: ours[-1] + 1 if ours else 0]
    line = one_line(error)
    if found.stack:
        last = found.stack[-1]
        line += f" ({Path(last.filename).name}:{last.lineno} in {last.name})"
    return line, "".join(found.format())[-MOST_TRACEBACK:]


class NotFound(Exception):
    """There is no function of this name; the message says which part of the name was not found."""


def find(name: str) -> Any:
    """The function that ``package.module:function`` names. Raises NotFound, with one line. A module
    of the start directory is found after every installed one."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise NotFound("it must have the form package.module:function")
    search_start_directory_last()
    # The user's module may fail in any way while it is imported, sys.exit() included.
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit, GeneratorExit) as error:
        why = f"cannot import {module_name}: {one_line(error)}"
        if isinstance(error, ModuleNotFoundError):
            meant = did_you_mean(module_name, _beside(module_name))
            why += f". {meant or 'Is it installed, or in the directory you start from?'}"
        raise NotFound(why.rstrip()) from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            # An installed module of the same name may hide a user's own.
            file = getattr(module, "__file__", None) or "it is built in"
            meant = did_you_mean(part, (name for name in dir(target) if name[:1] != "_"))
            raise NotFound(f"{module_name} ({file}) has no {attribute!r}. {meant}".rstrip(". "))
        target = getattr(target, part)
    if not callable(target):
        raise NotFound("it is not a function")
    return target


def _beside(module: str) -> Iterator[str]:
    """Modules in the package of ``module``, or without one in the start directory."""
    package = module.rpartition(".")[0]
    prefix, places = "", [str(Path.cwd())]
    if package:
        prefix, places = f"{package}.", getattr(sys.modules.get(package), "__path__", [])
    return (found.name for found in pkgutil.iter_modules(places, prefix))
