"""A group's prompt and masked completions, from its finished conversations.

conversation 1   S S S S a a | m m m S S m m      S: said to the model    masked, log-prob 0
conversation 2   S S S S b   | m m S m m m        m: made by the model    trained
                 └ prompt ┘└ completion ──────►   a, b: different openings are masked, too
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.payloads.group_limits import usable_reward
from rollout_worker.engine.base import Completion, Finish, merge_spans
from rollout_worker.environments.base import COMPONENT, TURNS, EnvironmentFailed, TurnRewards
from rollout_worker.environments.conversation import Conversation
from rollout_worker.rewards.score import number_of
from rollout_worker.rewards.scoring import Scores


def common_prompt(conversations: Sequence[Conversation]) -> NDArray[np.int32]:
    """The common prefix of all transcripts' openings. int32 [n]. A group has one prompt. If the
    environment opens differently for its samples, the rest of each opening goes to the completion.
    Raises EnvironmentFailed if there is no common prefix."""
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
    if the model produced the token. Version spans cover all of them. A masked token has the version
    of the model's token before it, or else of the first one after it: so it does not change the
    group's staleness."""
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
    """Position of each model turn's last token, in the completion after ``prompt`` tokens."""
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


_MOST = 64  # Components of a sample, as the controller checks
_ALLOWED = "a number, numbers by name, TurnRewards, or None"


def scores_of(results: Sequence[Any], turns: Sequence[int]) -> Scores | None:
    """Each sample's reward is the sum of its components. None: the environment does not score.
    ``turns``: the model's turns in each sample. Raises EnvironmentFailed for invalid rewards, and
    if only some samples are scored: rewards of one group must be comparable."""
    components = [_components(result) for result in results]
    if all(values is None for values in components):
        return None
    scored = [values for values in components if values is not None]
    if len(scored) < len(components):
        raise _bad(
            f"{len(scored)} of {len(components)} samples were scored and the others not; if an "
            "environment scores, it must also do so when its transcript is full (TranscriptFull)"
        )
    rewards = [math.fsum(values.values()) for values in scored]
    if not all(map(usable_reward, rewards)):
        raise _bad("the sum of a sample's rewards is not finite or above 1e9")
    placed = [_by_turn(result, count) for result, count in zip(results, turns, strict=True)]
    return Scores(rewards, scored, 0.0, placed)


def _by_turn(result: Any, turns: int) -> list[float]:
    if not isinstance(result, TurnRewards):
        return []
    if len(result.turns) != turns:
        raise _bad(f"it returned rewards of {len(result.turns)} turns, the model had {turns}")
    return [_number(value) for value in result.turns]


def _components(result: Any) -> dict[str, float] | None:
    if result is None:
        return None
    if isinstance(result, TurnRewards):
        whole = {TURNS: math.fsum(map(_number, result.turns))}
        return whole | (_components(result.outcome) or {})
    if isinstance(result, Mapping):
        if not 0 < len(result) <= _MOST:
            raise _bad(f"it returned {len(result)} rewards, 1 to {_MOST} allowed")
        return {str(name)[:64]: _number(value) for name, value in result.items()}
    return {COMPONENT: _number(result)}


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise _bad(f"it returned {value!r:.80}, not {_ALLOWED}")
    return number_of(value, lambda detail: _bad(f"it {detail}"), _ALLOWED)


def _bad(detail: str) -> EnvironmentFailed:
    return EnvironmentFailed("environment_error", detail)
