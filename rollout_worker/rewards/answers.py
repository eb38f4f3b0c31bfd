r"""Answers in texts: the content of the last \boxed{...}, and what completions vote for."""

from __future__ import annotations

import re

LONGEST = 256
"""Characters of an answer that are compared."""
_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
"""A brace, a box that opens, or an escaped character, which is no brace."""
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


def answer_of_text(vote: str, text: str) -> str:
    """What the completion ``text`` votes for; "": nothing.

    ``vote``: text (all of it), boxed, number, or math: boxed, else number. See EvalSetConfig.vote.
    """
    if vote == "text":
        return text.strip()[:LONGEST]
    found = _boxed(text) if vote in ("boxed", "math") else ""
    if not found and vote in ("number", "math"):
        numbers = _NUMBER.findall(text)
        found = _plain(numbers[-1]) if numbers else ""
    return found[:LONGEST]


def _boxed(text: str) -> str:
    r"""Content of the last \boxed{...} without blanks; "" if there is none."""
    content = "".join((last_boxed(text) or "").split())
    return _plain(content) if _NUMBER.fullmatch(content) else content


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
    """The same for 7, 7.0 and 007; and for 1,000 and 1000. As text: a number may be too long for
    arithmetic."""
    sign, digits = number[: number.startswith("-")], number.lstrip("-").replace(",", "")
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value
