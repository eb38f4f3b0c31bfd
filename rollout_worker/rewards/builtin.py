"""Built-in rewards. Each is 0 or 1."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any


def exact_match(prompt: str, completion: str, answer: Any) -> float:
    """1 if the completion equals the answer, or one of a list of answers. Surrounding blanks are
    ignored.
    """
    answers = answer if isinstance(answer, list | tuple) else [answer]
    return float(any(completion.strip() == str(one).strip() for one in answers))


def math_verify(prompt: str, completion: str, answer: Any) -> float:
    """1 if the completion's last mathematical expression equals the answer, by math-verify."""
    import math_verify as library

    # The library's time limit is an alarm signal, which only the main thread can receive.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    text = str(answer)
    gold = library.parse(text, parsing_timeout=limit) or library.parse(
        f"${text}$", parsing_timeout=limit
    )
    found = library.parse(completion, parsing_timeout=limit)
    return float(library.verify(gold, found, timeout_seconds=limit))


def format_reward(pattern: str) -> Callable[..., float]:
    """A reward that is 1 if ``pattern`` is found in the completion; a dot matches line ends, too.
    Raises re.error.
    """
    compiled = re.compile(pattern, re.DOTALL)

    def matches(prompt: str, completion: str) -> float:
        return float(compiled.search(completion) is not None)

    return matches
