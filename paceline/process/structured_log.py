"""Structured logs: events with fields, one line each."""

import logging
import re
import sys
from typing import Any, TextIO

from paceline.masking import masked


class MaskingFormatter(logging.Formatter):
    """Masks what a URL has in it, in the texts and tracebacks of libraries, too."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def setup(process: str, *, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Sends every log line of this process to ``stream`` (default: standard error)."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        MaskingFormatter(
            f"%(asctime)s.%(msecs)03d %(levelname).1s {process} %(message)s", datefmt="%H:%M:%S"
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def event(
    logger: logging.Logger, message: str, /, level: int = logging.INFO, **fields: Any
) -> None:
    """Logs ``message`` followed by ``key=value`` pairs."""
    if logger.isEnabledFor(level):
        logger.log(
            level, "%s", " ".join([message, *(f"{k}={_show(v)}" for k, v in fields.items())])
        )


def first_line(error: BaseException | str | None) -> str:
    """The first line of an error's message; the name of its type if it has no message. Without
    gloo's source location and advice."""
    text = re.sub(r"^\[\S*gloo\S*:\d+\] |\. This is typically caused.*", "", str(error or ""))
    text = masked(text).strip()
    if not text and isinstance(error, BaseException):
        text = type(error).__name__
    return text.split("\n", 1)[0].rstrip()


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return repr(text) if " " in text else text
