"""Preview of a recorded row: its text as a model reads it, with what is trained marked.

python -P -m paceline.dataset.recorded_preview CONFIG_AS_JSON < ROW_AS_JSON
"""

import sys
from collections.abc import Callable, Sequence
from itertools import groupby

from paceline.config.schema import Config
from paceline.dataset.recorded_encoding import RecordedCompletion, RecordedRow, RowEncoder
from paceline.errors import BadInput
from paceline.process.lifetime import leave_after
from paceline.process.user_code import asked
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer

BEGIN, END = "⟦", "⟧"
LONGEST = 1200
"""Characters of one text; the middle of a longer one is left out."""
NAMES = {1: ("completion",), 2: ("chosen", "rejected")}

Decode = Callable[[Sequence[int]], str]


def row_text(row: RecordedRow, decode: Decode, ends: Sequence[int] = ()) -> str:
    paragraphs = [
        f"what is trained is between {BEGIN} and {END}; a turn ends with "
        f"{' or '.join(repr(decode([end])) for end in ends) or 'no token'}",
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


def main() -> int:
    given = asked()
    config = Config.model_validate(given["config"])
    tokenizer = PromptTokenizer(config)
    try:
        row = RowEncoder(config, tokenizer).encode(given["row"])
    except BadPrompt as error:
        raise BadInput(f"the first row would be dropped ({error.reason}): {error}") from None
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # whatever the locale is
    print(row_text(row, tokenizer.decode_all, tokenizer.end_tokens))
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
