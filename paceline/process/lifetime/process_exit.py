"""Exit of a worker process, without a slow teardown of the interpreter."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from paceline.errors import Unreachable, UserError

ENGINE_LOST = 3
"""Exit status of a rollout worker whose engine died while it generated, perhaps because of a
prompt."""


def leave(status: int) -> NoReturn:
    """Ends the process with ``status`` at once.

    Tearing down an interpreter with torch and its threads takes seconds, and the supervisor would
    wait for them. Files must be closed and children ended before the call.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # The reader of the stream has gone.
            pass
    os._exit(status)


def exit_status(main: Callable[[], int], program: str) -> int:
    """Runs ``main`` and returns the exit status.

    A ``UserError`` is printed after the program's name, without a traceback, and has its own
    status.
    """
    try:
        return main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"{program}: {line}", file=sys.stderr)
        # A worker's status 3 is ENGINE_LOST: an unreachable controller must not look like one.
        return 1 if isinstance(error, Unreachable) else error.exit_status
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1


def leave_after(main: Callable[[], int], program: str = "error") -> NoReturn:
    """Ends the process with the exit status of ``main``, at once even if ``main`` raises.

    A thread stuck in a collective would keep the interpreter alive forever, and the supervisor
    would wait for it instead of starting the process again.
    """
    leave(exit_status(main, program))
