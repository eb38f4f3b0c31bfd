"""Answers of completions, for majority votes: texts that are equal if the answers are."""

from __future__ import annotations

import re

LONGEST = 256
"""Characters of an answer that are compared."""
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
    r"""Content of the last \boxed{...} whose braces are balanced, without blanks; "" if there is none."""
    at = len(text)
    while (at := text.rfind(r"\boxed{", 0, at)) >= 0:
        depth = 0
        for end in range(at + 6, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                content = "".join(text[at + 7 : end].split())
                return _plain(content) if _NUMBER.fullmatch(content) else content
    return ""


def _plain(number: str) -> str:
    """The same for 7, 7.0 and 007; and for 1,000 and 1000. As text: a number may be too long for arithmetic."""
    sign, digits = number[: number.startswith("-")], number.lstrip("-").replace(",", "")
    whole, _, fraction = digits.partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value
