"""Preview of a recorded row: its text as a model reads it, with what is trained marked.

python -P -m paceline.dataset.recorded_preview CONFIG_AS_JSON < ROW_AS_JSON
"""

import sys
from itertools import groupby

import numpy as np

from paceline.config.schema import Config
from paceline.dataset.recorded_encoding import RowEncoder
from paceline.errors import BadInput
from paceline.process.lifetime import leave_after
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from paceline.user_code import asked
from paceline.v1 import rollout_pb2

BEGIN, END = "⟦", "⟧"
LONGEST = 1200
"""Characters of one text; the middle of a longer one is left out."""
NAMES = {1: ("completion",), 2: ("chosen", "rejected")}


def row_text(group: rollout_pb2.Group, tokenizer: PromptTokenizer) -> str:
    decode = tokenizer.decode_all
    ends = " or ".join(repr(decode([end])) for end in tokenizer.end_tokens) or "no token"
    prompt = np.frombuffer(group.prompt_tokens, "<i4").tolist()
    paragraphs = [
        f"what is trained is between {BEGIN} and {END}; a turn ends with {ends}",
        f"prompt, {_count(len(prompt))}: {decode(prompt)}",
    ]
    for name, completion in zip(NAMES[len(group.completions)], group.completions, strict=True):
        tokens = np.frombuffer(completion.tokens, "<i4").tolist()
        mask = completion.loss_mask or bytes([1]) * len(tokens)
        text = ""
        for trained, span in groupby(zip(mask, tokens, strict=True), key=lambda pair: pair[0]):
            piece = decode([token for _, token in span])
            text += f"{BEGIN}{piece}{END}" if trained else piece
        paragraphs.append(f"{name}, {_count(len(tokens))}, {sum(mask)} trained: {text}")
    return "\n".join(_shortened(each).replace("\n", "\n    ") for each in paragraphs)


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
        group = RowEncoder(config, tokenizer).encode(given["row"])
    except BadPrompt as error:
        raise BadInput(f"the first row would be dropped ({error.reason}): {error}") from None
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # whatever the locale is
    print(row_text(group, tokenizer))
    return 0


if __name__ == "__main__":
    leave_after(main, "check")
