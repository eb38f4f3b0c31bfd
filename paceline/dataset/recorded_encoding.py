"""Encoding of recorded rows: from a row to tokens, and to the group that a rollout worker submits.

The prompt and each following piece are tokenised by themselves: the prompt has the tokens that an
engine would get, and both completions of a pair have the same prompt. In a conversation a template
with ``{% generation %}`` marks what the assistant wrote. With another one the conversation is
rendered turn by turn; a template that rewrites past turns (drops their reasoning) is refused.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.model_files import positions
from paceline.config.schema import Config
from paceline.dataset.messages import Message
from paceline.dataset.recorded_rows import ASSISTANT, RowParts, parts_of
from paceline.dataset.rows import DataError
from paceline.prompt_tokenizer import BadPrompt, Prompt, PromptTokenizer
from paceline.v1 import common_pb2, rollout_pb2

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
        between = tokenizer.after(whole[:end], whole[end:start])
        if trained and _end_turn(tokenizer, tokens, trained, between[:1]):
            between = between[1:]
        tokens += between
        trained += [0] * len(between)
        end = len(_prefix(tokenizer.conversation(messages[: turn + 1]), whole, turn + 1))
        answer = tokenizer.after(whole[:start], whole[start:end])
        ends = [i for i, token in enumerate(answer) if tokenizer.ends_turn(token)]
        if ends:
            # No model writes what the template adds after that.
            written = ends[-1] + 1
        else:
            end = start + len(_without_margin(whole[start:end], str(messages[turn]["content"])))
            answer = tokenizer.after(whole[:start], whole[start:end])
            written = len(answer)
        tokens += answer
        trained += [1] * written + [0] * (len(answer) - written)
    _end_turn(tokenizer, tokens, trained, [])
    return tokens, trained


def _end_turn(
    tokenizer: PromptTokenizer, tokens: list[int], trained: list[int], next_token: list[int]
) -> bool:
    """Appends an end to an answer that the template leaves without one, so that the model learns to
    stop: ``next_token``, with which the next turn begins, if that is how the model stops, else the
    end of the sequence. Returns True if it was ``next_token``."""
    last = max((i for i, mark in enumerate(trained) if mark), default=None)
    if last is None or tokenizer.ends_turn(tokens[last]) or not tokenizer.end_tokens:
        return False
    stops = bool(next_token) and tokenizer.ends_turn(next_token[0])
    tokens += next_token if stops else tokenizer.end_tokens[:1]
    trained += [1]
    return stops


def _without_margin(text: str, content: str) -> str:
    """``text`` without the blanks that the template writes after ``content``."""
    return text if content != content.rstrip() else text.rstrip()


def _prefix(text: str, whole: str, turns: int) -> str:
    if not whole.startswith(text):
        raise BadPrompt(
            "malformed_row",
            f"the chat template renders the first {turns} messages differently if others follow, "
            "so what the assistant wrote cannot be found: give the template {% generation %} "
            "marks, or one row for each turn, with the earlier ones in data.prompt_field",
        )
    return text


_MAX_TEXT = 1 << 16
"""Characters of a text that are sent along; texts are for people."""


@dataclass(frozen=True, slots=True)
class RecordedCompletion:
    """``tokens`` int32 [n]; ``trained`` uint8 [n]: 1 for the assistant's; ``text``: with special
    ones."""

    tokens: NDArray[np.int32]
    trained: NDArray[np.uint8]
    reward: float
    text: str


@dataclass(frozen=True, slots=True)
class RecordedRow:
    prompt: Prompt
    completions: tuple[RecordedCompletion, ...]


class RowEncoder:
    """Encodes the rows of one run."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        self._data = config.data
        self._tokenizer = tokenizer
        self._longest = min(config.longest_sequence, positions(config.model.path) or sys.maxsize)

    def encode(self, row: Mapping[str, Any]) -> RecordedRow:
        """Raises BadPrompt with the reason malformed_row, prompt_too_long or row_too_long."""
        try:
            parts = parts_of(row, self._data)
        except DataError as error:
            raise BadPrompt("malformed_row", str(error)) from None
        prompt = self._tokenizer.opening(parts.prompt)
        count, limit = len(prompt.tokens), self._tokenizer.limit
        if not count:
            raise BadPrompt("malformed_row", "the prompt gives no tokens")
        if count > limit:
            raise BadPrompt("prompt_too_long", f"{count} tokens, at most {limit}")
        completions = tuple(self._completion(parts, number) for number in range(len(parts.rewards)))
        longest = len(prompt.tokens) + max(len(c.tokens) for c in completions)
        if longest > self._longest:
            raise BadPrompt(
                "row_too_long",
                f"{longest} tokens with the prompt, at most {self._longest} (rollout.max_context, "
                "or data.max_prompt_tokens + rollout.max_tokens, and what model.path takes)",
            )
        return RecordedRow(prompt, completions)

    def _completion(self, parts: RowParts, number: int) -> RecordedCompletion:
        prompt, following = parts.prompt, parts.completions[number]
        if isinstance(prompt, str) or isinstance(following, str):
            tokens = self._text(str(prompt), str(following))
            trained = [1] * len(tokens)
        else:
            tokens, trained = self._chat(prompt, following)
        if not any(trained):
            raise BadPrompt("malformed_row", "a completion has no token to train")
        return RecordedCompletion(
            np.array(tokens, dtype=np.int32),
            np.array(trained, dtype=np.uint8),
            parts.rewards[number],
            self._tokenizer.decode_all(tokens),
        )

    def _text(self, prompt: str, text: str) -> list[int]:
        """With the end of the sequence, so that the model learns to stop."""
        tokens = self._tokenizer.after(prompt, text)
        ends = self._tokenizer.end_tokens
        return tokens if not ends or tokens[-1:] == [ends[0]] else [*tokens, ends[0]]

    def _chat(self, prompt: list[Message], following: list[Message]) -> tuple[list[int], list[int]]:
        find = marked_answers if self._tokenizer.marks_answers else rendered_answers
        tokens, trained = find(self._tokenizer, prompt, following)
        # Nothing is learnt from what follows the last trained token.
        last = max((i for i, mark in enumerate(trained) if mark), default=-1) + 1
        return tokens[:last], trained[:last]


def recorded_group(
    task: common_pb2.TaskRef, kind: rollout_pb2.TaskKind, row: RecordedRow
) -> rollout_pb2.Group:
    """The group of ``row``. No weights sampled it: its versions and log-probs are 0."""
    return rollout_pb2.Group(
        task=task,
        kind=kind,
        prompt_tokens=row.prompt.tokens.astype("<i4").tobytes(),
        completions=[_completion(completion) for completion in row.completions],
        prompt_text=row.prompt.text[:_MAX_TEXT],
    )


def _completion(completion: RecordedCompletion) -> rollout_pb2.Completion:
    count = len(completion.tokens)
    return rollout_pb2.Completion(
        tokens=completion.tokens.astype("<i4").tobytes(),
        logprobs=np.zeros(count, dtype="<f4").tobytes(),
        versions=[common_pb2.VersionSpan(version=0, length=count)],
        finish_reason=rollout_pb2.FINISH_REASON_STOP,
        reward=completion.reward,
        loss_mask=b"" if completion.trained.all() else completion.trained.tobytes(),
        text=completion.text[:_MAX_TEXT],
    )
