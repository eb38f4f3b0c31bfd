"""From finished conversations to what the trainer reads: one prompt, and a masked completion each.

conversation 1   S S S S a a | m m m S S m m      S: said to the model    masked, log-prob 0
conversation 2   S S S S b   | m m S m m m        m: made by the model    trained
                 └ prompt ┘└ completion ──────►   a, b: where openings differ, they are masked too
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_worker.engine.base import Completion, Finish, merge_spans
from rollout_worker.environments.base import EnvironmentFailed
from rollout_worker.environments.conversation import Conversation


@dataclass(frozen=True, slots=True)
class MaskedCompletion:
    completion: Completion
    """Tokens of both sides after the group's prompt; version spans cover all of them."""
    mask: NDArray[np.uint8]
    """[n], 1 where the model produced the token."""


def common_prompt(conversations: Sequence[Conversation]) -> NDArray[np.int32]:
    """The tokens that all transcripts begin with, at most those before the first turn. int32 [n].

    A group has one prompt; where the environment opened differently for its samples, the rest of
    each opening goes to the completion. Raises EnvironmentFailed where nothing is common.
    """
    openings = [conversation.pieces[0].said for conversation in conversations]
    shortest = min(map(len, openings))
    first = openings[0][:shortest]
    differs = np.zeros(shortest, dtype=bool)
    for opening in openings[1:]:
        differs |= opening[:shortest] != first
    length = int(differs.argmax()) if differs.any() else shortest
    if length == 0:
        raise EnvironmentFailed(
            "environment_error", "the samples' first prompts have not even one token in common"
        )
    return first[:length]


def completion(conversation: Conversation, prompt: int) -> MaskedCompletion:
    """What follows the first ``prompt`` tokens.

    A masked token carries the version of the model's token before it (of the first one after it,
    where there is none): so it makes no group staler or fresher than what the model did.
    """
    pieces = conversation.pieces
    tokens: list[NDArray[np.int32]] = []
    logprobs: list[NDArray[np.float32]] = []
    mask: list[NDArray[np.uint8]] = []
    spans: list[tuple[int, int]] = []
    version = pieces[0].completion.versions[0][0]
    for number, piece in enumerate(pieces):
        said = piece.said if number else piece.said[prompt:]
        made = piece.completion.tokens
        tokens += [said, made]
        logprobs += [np.zeros(len(said), np.float32), piece.completion.logprobs]
        mask += [np.zeros(len(said), np.uint8), np.ones(len(made), np.uint8)]
        spans += [(version, len(said)), *piece.completion.versions]
        version = spans[-1][0]
    cut = conversation.full or pieces[-1].completion.finish is Finish.LENGTH
    return MaskedCompletion(
        Completion(
            np.concatenate(tokens),
            np.concatenate(logprobs),
            merge_spans(spans),
            Finish.LENGTH if cut else Finish.STOP,
        ),
        np.concatenate(mask),
    )


def readable(conversation: Conversation) -> list[dict[str, Any]]:
    """The transcript for reward functions: who said what, in order."""
    entries = []
    for piece in conversation.pieces:
        if piece.said_text:
            entries.append({"from": "environment", "text": piece.said_text})
        entries.append({"from": "model", "text": piece.turn.text, "finish": piece.turn.finish})
    return entries
