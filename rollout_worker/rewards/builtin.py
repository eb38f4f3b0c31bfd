"""Built-in rewards. Each is 0 or 1, and 0 for a row whose answer is null. If the answer is a list,
any of them counts."""

import functools
import re
import threading
from collections.abc import Callable
from decimal import Decimal
from types import ModuleType
from typing import Any, cast

LONGEST = 256  # Characters of an answer that are compared
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
"""A brace, a box that opens, or an escaped character, which is no brace."""
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def answer_of_text(vote: str, text: str) -> str:
    """The answer that the completion ``text`` votes for; "": nothing. ``vote``: text (all of it),
    boxed, number, or math: boxed, else number. See EvalSetConfig.vote."""
    if vote == "text":
        return text.strip()[:LONGEST]
    found = ""
    if vote in ("boxed", "math"):
        content = "".join((last_boxed(text) or "").split())
        found = _plain(content) if _NUMBER.fullmatch(content) else content
    if not found and vote in ("number", "math"):
        numbers = _NUMBER.findall(text)
        found = _plain(numbers[-1]) if numbers else ""
    return found[:LONGEST]


def last_boxed(text: str) -> str | None:
    r"""Content of the last \boxed{...} or \fbox{...} whose braces are balanced; None if there is
    none.

    Braces nest, and those of sets, \{ and \}, do not count.
    """
    found: slice | None = None
    opened: list[int | None] = []
    for brace in _BRACE.finditer(text):
        if brace["box"]:
            opened.append(brace.end())
        elif brace.group() == "{":
            opened.append(None)
        elif brace.group() == "}" and opened:
            start = opened.pop()
            if start is not None and (found is None or start > found.start):
                found = slice(start, brace.start())
    return text[found].strip() if found else None


def _plain(number: str) -> str:
    """The same for 7, 7.0 and 007; 1,000 and 1000. As text: numbers may be very long."""
    sign, digits = number[: number.startswith("-")], number.lstrip("-").replace(",", "")
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


_STEP_LIMIT_S = 3
"""Limit of each parse and of comparing: all of it ends before reward.timeout_s (10)."""
_LONGEST = 1000  # Characters of a box that is read: parsing a longer one would take all of the time
_DELIMITED = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL)
_SENTENCE = re.compile(r"####|(?<![\\A-Za-z])[A-Za-z]{2,}[,:;]?\s+(?:[A-Za-z]{2,}|\$?-?\d|\\)")
"""Signs of words around mathematics, as in "The answer is 12" or "#### 12"."""
_DIGITS = re.compile(r"\d")
_GROUPED = re.compile(r"\d{1,3}(?:(?:\\[!,;:> ]|[~\s])+\d{3})+")  # 1 000 or 1\,000
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:\.\d+)?[eE][+-]?\d{1,2}")
_WORDS = re.compile(r"\\(?:text|textbf|textit|textrm|mbox|mathrm)\s*\{([^{}]*)\}")


def exact_match(prompt: str, completion: str, answer: Any) -> float:
    """1 if the completion equals the answer, but for surrounding blanks."""
    return float(completion.strip() in [one.strip() for one in _texts_of(answer)])


def _texts_of(answer: Any) -> list[str]:
    answers = answer if isinstance(answer, list | tuple) else [answer]
    return [str(one) for one in answers if one is not None]


def math_verify(prompt: str, completion: str, answer: Any) -> float:
    """1 if the completion's last mathematical expression equals the answer, by math-verify."""
    library, golds = _prepared_library(), [_parsed_gold(one) for one in _texts_of(answer)]
    found = library.parse(completion, parsing_timeout=_limit())
    return float(any(library.verify(gold, found, timeout_seconds=_limit()) for gold in golds))


def boxed_reward(*, intervals: bool) -> Callable[..., float]:
    """A reward that is 1 if the content of the completion's last box equals the answer, by
    math-verify; without a box 0.

    Of an answer that has a box itself, such as a whole solution, the content counts. ``intervals``:
    an inequality may stand for an interval, as x<3 for (-\\infty,3); the other way round is always
    right.
    """

    def equals(prompt: str, completion: str, answer: Any) -> float:
        found, golds = _number(last_boxed(completion) or ""), _texts_of(answer)
        if not found or len(found) > _LONGEST:
            return 0.0
        if _words(found) in [_words(_inner(gold)) for gold in golds]:
            return 1.0
        verify, read = _prepared_library().verify, _parsed(found)
        limits = {"allow_set_relation_comp": intervals, "timeout_seconds": _limit()}
        return float(any(verify(_parsed_gold(gold), read, **limits) for gold in golds))

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


def _parsed(text: str) -> list[Any]:
    """``text`` as what it is: nothing is searched for."""
    library = _prepared_library()
    found: list[Any] = library.parse(
        f"\\boxed{{{text}}}",
        extraction_config=[library.LatexExtractionConfig()],
        parsing_timeout=_limit(),
    )
    return found


def _inner(answer: str) -> str:
    """The mathematics of an answer: the content of its last box, or what stands between its
    delimiters."""
    if (boxed := last_boxed(answer)) is not None:
        return _number(boxed)
    delimited = _DELIMITED.fullmatch(answer.strip())
    inner = next(filter(None, delimited.groups())) if delimited else answer
    return _number(inner.strip().rstrip("."))


def _number(text: str) -> str:
    """A number with digits in groups, or with an exponent of its own, as mathematics reads it;
    other text as it is."""
    if _GROUPED.fullmatch(text):
        return "".join(_DIGITS.findall(text))
    return f"{Decimal(text):f}" if _SCIENTIFIC.fullmatch(text) else text


def _has_words(inner: str) -> bool:
    """There are words around the mathematics: it is to be searched for."""
    without = _WORDS.sub(" ", inner)
    return _SENTENCE.search(without) is not None or "$" in without.replace("\\$", "")


def _parsed_gold(answer: str) -> list[Any]:
    """An answer may be bare LaTeX: a search would find a part of it."""
    inner = _inner(answer)
    if not _has_words(inner) and len(inner) <= _LONGEST and (found := _parsed(inner)):
        return found
    return list(_prepared_library().parse(answer, parsing_timeout=_limit()))


def _words(text: str) -> str:
    """Without blanks and the commands that set words: those are no product of letters."""
    return "".join(_WORDS.sub(r"\1", text).split())


def _limit() -> int | None:
    """The library's time limit is an alarm signal, which only the main thread can receive."""
    return _STEP_LIMIT_S if threading.current_thread() is threading.main_thread() else None


def format_reward(pattern: str) -> Callable[..., float]:
    """A reward that is 1 if ``pattern`` is found; a dot matches line ends. Raises re.error."""
    compiled = re.compile(pattern, re.DOTALL)

    def matches(prompt: str, completion: str) -> float:
        return float(compiled.search(completion) is not None)

    return matches
