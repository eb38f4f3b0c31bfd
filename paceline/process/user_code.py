"""Module search path of Paceline's processes: Paceline's own packages first, a user's files last.

A user's ``controller.py`` in the start directory must not replace Paceline's ``controller``. Every
process of ours is therefore started with ``python -P``, which leaves the start directory out, and
adds that directory at the end of ``sys.path`` before it imports a reward or an environment.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"


def python_module(module: str) -> tuple[str, ...]:
    """Command line that runs ``module`` of an installed package, never a file of the start
    directory."""
    return (sys.executable, "-P", "-m", module)


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


def hidden_file(module: str) -> Path | None:
    """The file or package of the start directory that an installed module of the same name hides."""
    name = module.partition(".")[0]
    here = Path.cwd()
    for path in (here / f"{name}.py", here / name):
        if path.is_file() or (path.is_dir() and any(path.glob("*.py"))):
            break
    else:
        return None
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    found = spec.origin if spec is not None else None
    return None if found in (None, str(path), str(path / "__init__.py")) else path
