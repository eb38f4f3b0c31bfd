"""Spans of the assistant in a conversation: which of its tokens the assistant wrote.

A template with ``{% generation %}`` marks them. With another, the conversation is rendered turn by
turn; one that rewrites past turns (drops their reasoning) is refused.
"""

from collections.abc import Sequence

from paceline.dataset.rows import Message
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer

ASSISTANT = "assistant"

Marked = tuple[list[int], list[int]]
"""Token ids of what follows the prompt, and 1 for each that the assistant wrote, else 0."""


def marked_answers(
    tokenizer: PromptTokenizer, prompt: Sequence[Message], following: Sequence[Message]
) -> Marked:
    """By the template's own marks. Raises BadPrompt."""
    tokens, trained = tokenizer.answers([*prompt, *following])
    opening = tokenizer.opening(list(prompt)).tokens.tolist()
    if tokens[: len(opening)] != opening:
        raise BadPrompt(
            "malformed_row", "the chat template renders the prompt differently once it is answered"
        )
    return tokens[len(opening) :], trained[len(opening) :]


def rendered_answers(
    tokenizer: PromptTokenizer, prompt: Sequence[Message], following: Sequence[Message]
) -> Marked:
    """By rendering turn by turn. Raises BadPrompt if a turn's text is no prefix of the whole."""
    messages = [*prompt, *following]
    whole = tokenizer.conversation(messages)
    tokens: list[int] = []
    trained: list[int] = []
    end = len(_prefix(tokenizer.opening(list(prompt)).text, whole, len(prompt)))
    for turn in range(len(prompt), len(messages)):
        if messages[turn]["role"] != ASSISTANT:
            continue
        start = len(_prefix(tokenizer.opening(messages[:turn]).text, whole, turn))
        between = tokenizer.encode(whole[end:start])
        end = len(_prefix(tokenizer.conversation(messages[: turn + 1]), whole, turn + 1))
        answer = tokenizer.encode(whole[start:end])
        written = _written(tokenizer, answer)
        tokens += between + answer
        trained += [0] * len(between) + [1] * written + [0] * (len(answer) - written)
    return tokens, trained


def _prefix(text: str, whole: str, turns: int) -> str:
    if not whole.startswith(text):
        raise BadPrompt(
            "malformed_row",
            f"the chat template renders the first {turns} messages differently if others follow, "
            "so what the assistant wrote cannot be found: give the template {% generation %} "
            "marks, or one row for each turn, with the earlier ones in data.prompt_field",
        )
    return text


def _written(tokenizer: PromptTokenizer, answer: list[int]) -> int:
    """Tokens up to the one that ends the turn: no model writes what the template adds then."""
    ends = [i for i, token in enumerate(answer) if tokenizer.is_special(token)]
    return ends[-1] + 1 if ends else len(answer)
