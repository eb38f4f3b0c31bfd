"""How a worker process ends once everything it had to do is done."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

ENGINE_LOST = 3
"""Exit status of a rollout worker whose engine died while it generated: perhaps of a prompt."""


def leave(status: int) -> NoReturn:
    """Ends the process with ``status`` at once.

    To take an interpreter full of torch and its threads apart takes seconds, for which whoever
    awaits the process would wait. Nothing may be left to be done: files are closed, children ended.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The reader has gone; there is nobody to tell.
            pass
    os._exit(status)


def leave_after(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` and ends the process with its status; 1, and a traceback, where it raises.

    Also then at once: a thread stuck in a collective would keep the interpreter from ending for
    ever, and whoever restarts processes that end would wait for it.
    """
    try:
        status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    leave(status)
