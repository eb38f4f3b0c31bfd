"""Sequences of tokens from the transcripts of a group's samples. A group has one prompt, so they
are masked:

    sample 1   S S S S a a | m m m S S m m      S: said to the model    masked, log-prob 0
      branch                     └ S m m        m: made by the model    trained
    sample 2   S S S S b   | m m S m m m        a, b: different openings are masked, too
               └ prompt ┘└ completion ──────►
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.payloads.routes import Routes
from rollout_worker.engine.base import Completion, Finish, merge_spans
from rollout_worker.environments.base import EnvironmentFailed
from rollout_worker.environments.conversation import Conversation
from rollout_worker.environments.transcript import TranscriptPiece

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SampleSequence:
    """The tokens of one transcript after those that it shares: with its group, or, as a branch,
    with an earlier sequence of its sample."""

    completion: Completion
    mask: NDArray[np.uint8]  # One a token: 1 if the model produced it
    turn_ends: dict[int, int]  # Position of the last token of each own turn, by its number
    of: int  # The sequence that it leaves, by its place in the sample; of the first one, itself
    path: Tokens  # The whole transcript
    shared: int  # Tokens of ``path`` before those of ``completion``


def common_prompt(conversations: Sequence[Conversation]) -> Tokens:
    """The common prefix of the openings of all samples' first transcripts. int32 [n]. A group has
    one prompt. If the environment opens differently for its samples, the rest of each opening goes
    to the completion. Raises EnvironmentFailed if there is no common prefix."""
    openings = [conversation.sequences[0].pieces[0].said for conversation in conversations]
    length = min(_common_length(openings[0], opening) for opening in openings)
    if length == 0:
        raise EnvironmentFailed(
            "environment_error", "the samples' first prompts have not even one token in common"
        )
    return openings[0][:length]


def _common_length(one: Tokens, other: Tokens) -> int:
    """Tokens with which both begin."""
    shortest = min(len(one), len(other))
    differs = one[:shortest] != other[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def sequences_of(conversation: Conversation, prompt: int) -> list[SampleSequence]:
    """``prompt``: tokens of the group's prompt. A branch shares as many tokens as it can with an
    earlier sequence, but none that the model produced for the branch itself: each of these is
    trained once."""
    found: list[SampleSequence] = []
    for transcript in conversation.sequences:
        own, path = transcript.own, transcript.tokens
        before = len(path) - sum(map(len, own))
        of, shared = 0, prompt
        if found:
            opening = path[: before + len(own[0].said)]
            lengths = [_common_length(opening, earlier.path) for earlier in found]
            shared = max(lengths)
            of = lengths.index(shared)
            _route_end(found[of], own[0].completion.prompt_routes, shared)
        full = conversation.full or transcript.full
        completion, mask = _masked(own, shared - before, full=full)
        ends = before - shared - 1 + np.cumsum([len(piece) for piece in own])
        numbers = [piece.turn.number for piece in own]
        turn_ends = dict(zip(numbers, ends.tolist(), strict=True))
        found.append(SampleSequence(completion, mask, turn_ends, of, path, shared))
    return found


def _route_end(earlier: SampleSequence, noted: Routes | None, shared: int) -> None:
    """Notes where the last token of ``earlier`` went, if a branch goes on from there: it was no
    input of the turn that made it, and is one of the branch's first turn."""
    routes = earlier.completion.routes
    if routes is not None and noted is not None and shared == len(earlier.path):
        routes[-1] = noted[shared - 1]


def _masked(
    pieces: Sequence[TranscriptPiece], skipped: int, *, full: bool
) -> tuple[Completion, NDArray[np.uint8]]:
    """The tokens of ``pieces``, of input and model, after the first ``skipped`` ones, which are
    input; and their mask, uint8 [n]: 1 if the model produced the token. Version spans cover all of
    them. A masked token has the version of the model's token before it, or else of the first one
    after it: so it does not change the group's staleness."""
    tokens: list[Tokens] = []
    logprobs: list[NDArray[np.float32]] = []
    mask: list[NDArray[np.uint8]] = []
    spans: list[tuple[int, int]] = []
    routes: list[Routes] = []
    version = pieces[0].completion.versions[0][0]
    for number, piece in enumerate(pieces):
        said = piece.said if number else piece.said[skipped:]
        made = piece.completion.tokens
        tokens += [said, made]
        logprobs += [np.zeros(len(said), np.float32), piece.completion.logprobs]
        mask += [np.zeros(len(said), np.uint8), np.ones(len(made), np.uint8)]
        spans += [(version, len(said)), *piece.completion.versions]
        version = spans[-1][0]
        noted = piece.completion.prompt_routes, piece.completion.routes
        if noted[0] is not None and noted[1] is not None:
            # The last token of the turn before was an input of this turn first.
            if routes:
                routes[-1][-1] = noted[0][-len(said) - 1]
            routes += [noted[0][len(noted[0]) - len(said) :], noted[1].copy()]
    cut = full or pieces[-1].completion.finish is Finish.LENGTH
    prompt_routes = pieces[0].completion.prompt_routes
    completion = Completion(
        np.concatenate(tokens),
        np.concatenate(logprobs),
        merge_spans(spans),
        Finish.LENGTH if cut else Finish.STOP,
        routes=np.concatenate(routes) if len(routes) == 2 * len(pieces) else None,
        prompt_routes=None if prompt_routes is None else prompt_routes[:skipped],
    )
    return completion, np.concatenate(mask)


def readable(conversation: Conversation) -> list[dict[str, Any]]:
    """The turns for reward functions, in the order in which they were asked for; those of the first
    branch have ``branch`` 1, and so on."""
    branch_of = {
        piece: {"branch": number} if number else {}
        for number, transcript in enumerate(conversation.sequences)
        for piece in transcript.own
    }
    entries: list[dict[str, Any]] = []
    for piece in conversation.turns:
        if piece.said_text:
            entries.append({"from": "environment", "text": piece.said_text} | branch_of[piece])
        entry = {"from": "model", "text": piece.turn.text, "finish": piece.turn.finish}
        entries.append(entry | branch_of[piece])
    return entries
