"""Encoding of recorded rows: from a row to tokens, and to the group that a rollout worker submits.

The prompt and each following piece are tokenised by themselves: the prompt has the tokens that an
engine would get, and both completions of a pair have the same prompt. In a conversation a template
with ``{% generation %}`` marks what the assistant wrote. With another one the conversation is
rendered turn by turn; a template that rewrites past turns (drops their reasoning) is refused.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.config.model_files import positions
from paceline.config.schema import Config
from paceline.dataset.messages import Message
from paceline.dataset.rows import DataError
from paceline.dataset.training_rows import ASSISTANT, Content, parts_of
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
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
        ends = [i for i, token in enumerate(answer) if token in tokenizer.end_tokens]
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
    if last is None or tokens[last] in tokenizer.end_tokens or not tokenizer.end_tokens:
        return False
    stops = bool(next_token) and next_token[0] in tokenizer.end_tokens
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


class RowEncoder:
    """Encodes the rows of one run."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        self._data = config.data
        self.tokenizer = tokenizer
        self._longest = min(config.longest_sequence, positions(config.model.path) or sys.maxsize)

    def encode(
        self,
        row: Mapping[str, Any],
        task: common_pb2.TaskRef | None = None,
        kind: rollout_pb2.TaskKind = rollout_pb2.TASK_KIND_TRAIN,
    ) -> rollout_pb2.Group:
        """The group of ``row``. No weights sampled it: its versions and log-probs are 0. Raises
        BadPrompt with the reason malformed_row, prompt_too_long or row_too_long."""
        try:
            parts = parts_of(row, self._data)
        except DataError as error:
            raise BadPrompt("malformed_row", str(error)) from None
        prompt = self.tokenizer.opening(parts.prompt)
        count, limit = len(prompt.tokens), self.tokenizer.limit
        if not count:
            raise BadPrompt("malformed_row", "the prompt gives no tokens")
        if count > limit:
            raise BadPrompt("prompt_too_long", f"{count} tokens, at most {limit}")
        marked = [self._marked(parts.prompt, following) for following in parts.completions]
        longest = count + max(len(tokens) for tokens, _ in marked)
        if longest > self._longest:
            raise BadPrompt(
                "row_too_long",
                f"{longest} tokens with the prompt, at most {self._longest} (rollout.max_context, "
                "or data.max_prompt_tokens + rollout.max_tokens, and what model.path takes)",
            )
        return rollout_pb2.Group(
            task=task,
            kind=kind,
            prompt_tokens=prompt.tokens.astype("<i4").tobytes(),
            completions=map(self._completion, marked, parts.rewards),
            prompt_text=prompt.text[:_MAX_TEXT],
        )

    def _marked(self, prompt: Content, following: Content) -> Marked:
        """The tokens up to the last trained one. Nothing is learnt from what follows."""
        if isinstance(prompt, str) or isinstance(following, str):
            tokens = self.tokenizer.after(str(prompt), str(following))
            ends = self.tokenizer.end_tokens
            if ends and tokens[-1:] != [ends[0]]:
                tokens = [*tokens, ends[0]]  # the model learns to stop
            trained = [1] * len(tokens)
        else:
            find = marked_answers if self.tokenizer.marks_answers else rendered_answers
            tokens, trained = find(self.tokenizer, prompt, following)
        if not any(trained):
            raise BadPrompt("malformed_row", "a completion has no token to train")
        last = max(i for i, mark in enumerate(trained) if mark) + 1
        return tokens[:last], trained[:last]

    def _completion(self, marked: Marked, reward: float) -> rollout_pb2.Completion:
        tokens, trained = marked
        return rollout_pb2.Completion(
            tokens=np.array(tokens, dtype="<i4").tobytes(),
            logprobs=np.zeros(len(tokens), dtype="<f4").tobytes(),
            versions=[common_pb2.VersionSpan(version=0, length=len(tokens))],
            finish_reason=rollout_pb2.FINISH_REASON_STOP,
            reward=reward,
            loss_mask=b"" if all(trained) else bytes(trained),
            text=self.tokenizer.decode_all(tokens)[:_MAX_TEXT],
        )
