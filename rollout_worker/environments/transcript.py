"""A group's prompt and masked completions, from its finished conversations.

conversation 1   S S S S a a | m m m S S m m      S: said to the model    masked, log-prob 0
conversation 2   S S S S b   | m m S m m m        m: made by the model    trained
                 └ prompt ┘└ completion ──────►   a, b: different openings are masked, too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_worker.engine.base import Completion, Finish, merge_spans
from rollout_worker.environments.base import EnvironmentFailed
from rollout_worker.environments.conversation import Conversation


def common_prompt(conversations: Sequence[Conversation]) -> NDArray[np.int32]:
    """The common prefix of all transcripts' openings. int32 [n].

    A group has one prompt. If the environment opens differently for its samples, the rest of each
    opening goes to the completion. Raises EnvironmentFailed if there is no common prefix.
    """
    openings = [conversation.pieces[0].said for conversation in conversations]
    shortest = min(map(len, openings))
    heads = np.stack([opening[:shortest] for opening in openings])
    differs = (heads != heads[0]).any(axis=0)
    length = int(differs.argmax()) if differs.any() else shortest
    if length == 0:
        raise EnvironmentFailed(
            "environment_error", "the samples' first prompts have not even one token in common"
        )
    return openings[0][:length]


def masked_completion(
    conversation: Conversation, prompt: int
) -> tuple[Completion, NDArray[np.uint8]]:
    """The tokens after the first ``prompt`` ones, of input and model; and their mask, uint8 [n]: 1
    if the model produced the token. Version spans cover all of them.

    A masked token has the version of the model's token before it, or else of the first one after
    it: so it does not change the group's staleness.
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
    completion = Completion(
        np.concatenate(tokens),
        np.concatenate(logprobs),
        merge_spans(spans),
        Finish.LENGTH if cut else Finish.STOP,
    )
    return completion, np.concatenate(mask)


def turn_ends(conversation: Conversation, prompt: int) -> list[int]:
    """Positions of the last token of each of the model's turns, in the completion after ``prompt``
    tokens."""
    lengths = [len(piece.said) + len(piece.completion.tokens) for piece in conversation.pieces]
    return [int(end) - prompt - 1 for end in np.cumsum(lengths)]


def readable(conversation: Conversation) -> list[dict[str, Any]]:
    """The transcript for reward functions, in order."""
    entries = []
    for piece in conversation.pieces:
        if piece.said_text:
            entries.append({"from": "environment", "text": piece.said_text})
        entries.append({"from": "model", "text": piece.turn.text, "finish": piece.turn.finish})
    return entries
