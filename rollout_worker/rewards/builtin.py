"""Built-in rewards. Each is 0 or 1."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from rollout_worker.rewards.answers import last_boxed

_STEP_LIMIT_S = 3
"""Of parsing the answer, parsing the completion, and comparing: all of it ends before
reward.timeout_s (10)."""
_LONGEST = 1000
"""Characters of a box that is read. A longer one is no answer, and parsing would take all of the
time."""
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm)\s*\{([^{}]*)\}")


def exact_match(prompt: str, completion: str, answer: Any) -> float:
    """1 if the completion equals the answer, or one of a list of answers. Surrounding blanks are
    ignored."""
    answers = answer if isinstance(answer, list | tuple) else [answer]
    return float(any(completion.strip() == str(one).strip() for one in answers))


def math_verify(prompt: str, completion: str, answer: Any) -> float:
    """1 if the completion's last mathematical expression equals the answer, by math-verify."""
    library, limit = _prepared_library(), _limit(5)
    text = str(answer)
    gold = library.parse(text, parsing_timeout=limit) or library.parse(
        f"${text}$", parsing_timeout=limit
    )
    found = library.parse(completion, parsing_timeout=limit)
    return float(library.verify(gold, found, timeout_seconds=limit))


def boxed_reward(*, intervals: bool) -> Callable[..., float]:
    """A reward that is 1 if the content of the completion's last box equals the answer, by
    math-verify; without a box 0.

    Of an answer that has a box itself, such as a whole solution, the content counts. ``intervals``:
    an inequality may stand for an interval, as x<3 for (-\\infty,3); the other way round is always
    right.
    """

    def equals(prompt: str, completion: str, answer: Any) -> float:
        found = last_boxed(completion)
        if not found or len(found) > _LONGEST:
            return 0.0
        gold = last_boxed(str(answer)) or str(answer).strip()
        return float(_words(found) == _words(gold) or _same(gold, found, intervals))

    return equals


math_boxed = boxed_reward(intervals=False)
math_boxed_intervals = boxed_reward(intervals=True)


@functools.cache
def _prepared_library() -> ModuleType:
    """math-verify after its first parse, which loads grammars: on a busy machine that alone takes
    seconds, and would make a right answer wrong."""
    import math_verify as library

    library.parse(r"\boxed{\frac{1}{2}}", parsing_timeout=None)
    return cast(ModuleType, library)


def _same(gold: str, found: str, intervals: bool) -> bool:
    library = _prepared_library()
    # Nothing is searched for: the box is all there is to read.
    reads, limit = [library.LatexExtractionConfig()], _limit(_STEP_LIMIT_S)
    parsed = (
        library.parse(f"\\boxed{{{text}}}", extraction_config=reads, parsing_timeout=limit)
        for text in (gold, found)
    )
    return bool(library.verify(*parsed, allow_set_relation_comp=intervals, timeout_seconds=limit))


def _words(text: str) -> str:
    """Without blanks and without the commands that set words in a formula: those are no product of
    letters."""
    return "".join(_WORDS.sub(r"\1", text).split())


def _limit(seconds: int) -> int | None:
    """The library's time limit is an alarm signal, which only the main thread can receive."""
    return seconds if threading.current_thread() is threading.main_thread() else None


def format_reward(pattern: str) -> Callable[..., float]:
    """A reward that is 1 if ``pattern`` is found in the completion; a dot matches line ends, too.
    Raises re.error."""
    compiled = re.compile(pattern, re.DOTALL)

    def matches(prompt: str, completion: str) -> float:
        return float(compiled.search(completion) is not None)

    return matches
