"""Text of a recorded row as a model reads it, with what is trained marked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from paceline.recorded.encoding import RecordedCompletion, RecordedRow

BEGIN, END = "⟦", "⟧"
"""Around what is trained."""
LONGEST = 1200
"""Characters of one text; the middle of a longer one is left out."""
NAMES = {1: ("completion",), 2: ("chosen", "rejected")}

Decode = Callable[[Sequence[int]], str]
"""Text of tokens, with special tokens."""


def row_text(row: RecordedRow, decode: Decode) -> str:
    """The prompt and each completion of ``row``, one paragraph each."""
    paragraphs = [
        f"what is trained is between {BEGIN} and {END}",
        f"prompt, {_count(len(row.prompt.tokens))}: {decode(row.prompt.tokens.tolist())}",
    ]
    for name, completion in zip(NAMES[len(row.completions)], row.completions, strict=True):
        trained = f"{_count(len(completion.tokens))}, {int(completion.trained.sum())} trained"
        paragraphs.append(f"{name}, {trained}: {_marked(completion, decode)}")
    return "\n".join(_shortened(each).replace("\n", "\n    ") for each in paragraphs)


def _marked(completion: RecordedCompletion, decode: Decode) -> str:
    tokens = completion.tokens.tolist()
    text, start = "", 0
    for trained, span in groupby(completion.trained.tolist()):
        end = start + len(list(span))
        piece = decode(tokens[start:end])
        text += f"{BEGIN}{piece}{END}" if trained else piece
        start = end
    return text


def _count(tokens: int) -> str:
    return f"{tokens} token{'' if tokens == 1 else 's'}"


def _shortened(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    head, tail = 2 * LONGEST // 3, LONGEST // 3
    return f"{text[:head]} ... {len(text) - head - tail:,} characters ... {text[-tail:]}"
