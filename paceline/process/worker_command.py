"""Command line of a worker process: the arguments that policy and rollout workers share."""

from __future__ import annotations

import argparse
import gc
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.errors import UserError
from paceline.process import stacks
from paceline.process.files import set_process_limits
from paceline.process.lifetime import leave_after
from paceline.user_code import search_start_directory_last
from paceline.worker_pools import SCORER

if TYPE_CHECKING:
    from paceline.config.schema import Config

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Sizes of the thread pools of torch and numpy, read when these are imported."""


def worker_command(
    role: str, run: Callable[[Config, argparse.Namespace], int] | None = None
) -> NoReturn:
    """Parses the command line, calls ``run`` and ends the process with its exit status. ``role``:
    policy, rollout or scorer. ``run`` imports torch itself, because its thread pools are sized
    here, once. None: the ``run`` of the role's module ``main``."""

    def main() -> int:
        options = _parser(role).parse_args()
        set_process_limits()
        search_start_directory_last()
        stacks.install()
        from paceline.config.load import load_config

        config = load_config(options.config, options.overrides)
        threads = getattr(config.fleet, f"{role}_threads")
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
        if run is None:
            with without_collection():
                main: Any = importlib.import_module(f"{role}_worker.main")
        try:
            return int((run or main.run)(config, options))
        except (SystemExit, GeneratorExit) as left:
            # Of an objective, a model's code, or a task that a reward started: no end of the run.
            raise UserError(f"code of the user ended the worker ({left!r})") from left

    leave_after(main, f"{role}_worker")


@contextmanager
def without_collection() -> Iterator[None]:
    """For the imports of torch and transformers, which make a million objects that stay. The
    garbage collector would look at all of them a dozen times: a fifth of a worker's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _parser(role: str) -> argparse.ArgumentParser:
    program = f"{role}_worker"
    parser = argparse.ArgumentParser(
        prog=program, description=f"Starts one {role} worker. `paceline {role}` runs this command."
    )
    parser.add_argument("config", type=Path, help="TOML file of the run")
    parser.add_argument(
        "--controllers",
        required=True,
        type=lambda text: [part.strip() for part in text.split(",") if part.strip()],
        help="host:port of each controller, comma-separated",
    )
    parser.add_argument("--id", default=f"{role}-0", help="name of this worker, unique in the run")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="overrides")
    parser.add_argument("--run-dir", type=Path, help="default: the one that the controller names")
    parser.add_argument(
        "--tensor-host", help="address at which other workers reach this one; default: found out"
    )
    if role == SCORER:
        parser.add_argument(
            "--scorer",
            required=True,
            metavar="NAME",
            help="its section in the config: scorers.NAME",
        )
    return parser
