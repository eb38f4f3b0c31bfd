"""Protobuf messages of tasks: leases, scored groups, returns, unfinished completions.

The next attempt at a task continues its unfinished completions:

- Tokens, log-probs and versions stay as they were. The next attempt's random numbers are those of
  the same seed, completion and position (see Engine.exact_continuation).
- A prefix is used only after the prompt that it continues, and only up to the version that the
  engine serves: within a completion versions never fall.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.schema import Config
from paceline.config.sections.evaluation import EvalSetConfig
from paceline.groups.completions import check_logprobs, version_spans
from paceline.groups.limits import task_settings
from paceline.ids import ANY
from paceline.prompt_tokenizer import Prompt
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish, SamplingParams
from rollout_worker.failures import AttemptFailed
from rollout_worker.rewards.answers import answer_of_text
from rollout_worker.rewards.scoring import Scores

_FINISH = {
    Finish.STOP: rollout_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    Finish.PARTIAL: rollout_pb2.FINISH_REASON_UNSPECIFIED,
}
_FINISH_OF = {reason: finish for finish, reason in _FINISH.items()}
_MAX_TEXT = 1 << 16
"""Characters of a text that are sent along; texts are for people."""


def row_of(lease: rollout_pb2.Lease) -> dict[str, Any]:
    """Raises AttemptFailed."""
    try:
        row = json.loads(lease.row_json)
    except json.JSONDecodeError as error:
        raise AttemptFailed("malformed_row", str(error)) from error
    if not isinstance(row, dict):
        raise AttemptFailed("malformed_row", "the row is not a JSON object")
    return row


def in_data_fields(row: dict[str, Any], lease: rollout_pb2.Lease, config: Config) -> dict[str, Any]:
    """The lease's row with prompt and answer in the fields that ``data`` names, also if its set
    names others."""
    of, data = eval_set_of(lease, config), config.data
    if of is None:
        return row
    named = {data.prompt_field: of.prompt_field, data.answer_field: of.answer_field}
    given = {to: row[name] for to, name in named.items() if to and name and name in row}
    return {**row, **given}


def is_evaluation(lease: rollout_pb2.Lease) -> bool:
    return lease.kind == rollout_pb2.TASK_KIND_EVAL


def eval_set_of(lease: rollout_pb2.Lease, config: Config) -> EvalSetConfig | None:
    """The named set of an evaluation; None for that of data.eval_path, and for training tasks."""
    return config.evaluation.sets.get(lease.eval_set) if lease.eval_set else None


def answer_of(row: Mapping[str, Any], config: Config) -> Any:
    field = config.data.answer_field
    return row.get(field) if field else None


def settings_of(lease: rollout_pb2.Lease, config: Config) -> rollout_pb2.TaskSettings:
    """Settings of the task, as its lease has them: they may change during a run."""
    return lease.settings if lease.HasField("settings") else task_settings(config)


def sampling_params(config: Config, lease: rollout_pb2.Lease) -> SamplingParams:
    settings, rollout = settings_of(lease, config), config.rollout
    of = eval_set_of(lease, config)
    return SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=(of and of.temperature) or rollout.temperature,
        top_p=(of and of.top_p) or settings.top_p,
        top_k=settings.top_k,
        stop=tuple(rollout.stop),
        seed=lease.seed,
        greedy=is_evaluation(lease) if of is None else of.is_greedy,
    )


def returned(
    task: common_pb2.TaskRef,
    reason: str,
    detail: str = "",
    kind: rollout_pb2.ReturnKind = rollout_pb2.RETURN_KIND_FAILED,
) -> rollout_pb2.ReturnedTask:
    return rollout_pb2.ReturnedTask(task=task, kind=kind, reason=reason, detail=detail[:1000])


@dataclass(frozen=True, slots=True)
class GeneratedGroup:
    """A lease's completions; all sequences are in the order of the completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    texts: list[str]
    scored: Mapping[str, list[Any]]
    """What the reward functions score; see Job.each."""
    scores: Scores | None = None
    """Of an environment that scores by itself."""
    masks: Sequence[NDArray[np.uint8]] = ()
    """1 where the model produced the token; empty: it produced all."""
    turn_ends: Sequence[Sequence[int]] = ()
    """Positions of the last token of each turn of the model; empty: there are no turns."""


def _token_bytes(tokens: NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def _completion_fields(completion: Completion) -> dict[str, Any]:
    """The fields that Completion and PartialCompletion share."""
    return {
        "tokens": _token_bytes(completion.tokens),
        "logprobs": np.ascontiguousarray(completion.logprobs, dtype="<f4").tobytes(),
        "versions": [
            common_pb2.VersionSpan(version=version, length=length)
            for version, length in completion.versions
        ],
        "finish_reason": _FINISH[completion.finish],
    }


def group_message(
    lease: rollout_pb2.Lease,
    made: GeneratedGroup,
    scores: Scores,
    *,
    generate_s: float,
    vote: str = "",
) -> rollout_pb2.Group:
    """``vote``: what the completions vote on (see answer_of_text); "": on nothing."""
    scored = zip(made.completions, made.texts, scores.rewards, scores.components, strict=True)
    group = rollout_pb2.Group(
        task=lease.task,
        kind=lease.kind,
        prompt_tokens=_token_bytes(made.prompt.tokens),
        completions=[
            rollout_pb2.Completion(
                **_completion_fields(completion),
                reward=reward,
                reward_components=components,
                text=text[:_MAX_TEXT],
                answer=answer_of_text(vote, text) if vote else "",
            )
            for completion, text, reward, components in scored
        ],
        generate_s=generate_s,
        reward_s=scores.seconds,
        prompt_text=made.prompt.text[:_MAX_TEXT],
        prompt_cut=made.prompt.cut,
    )
    for completion, mask in zip(group.completions, made.masks, strict=False):
        completion.loss_mask = b"" if mask.all() else mask.tobytes()
    for index, placed in enumerate(scores.placed):
        places = made.turn_ends[index] if made.turn_ends else range(len(placed))
        if placed:
            group.completions[index].token_rewards.extend(
                rollout_pb2.TokenReward(token=token, reward=reward)
                for token, reward in zip(places, placed, strict=True)
            )
    return group


def add_columns(group: rollout_pb2.Group, columns: Mapping[str, Sequence[bytes]]) -> None:
    """``columns``: by name, the bytes of each completion's numbers."""
    for name, of_completions in columns.items():
        for completion, column in zip(group.completions, of_completions, strict=True):
            completion.columns[name] = column


def partial_group(
    task: common_pb2.TaskRef,
    prompt_tokens: NDArray[np.int32],
    completions: Sequence[Completion | None],
) -> rollout_pb2.PartialGroup:
    """``completions``: one for each of the group; None: no token of it yet."""
    return rollout_pb2.PartialGroup(
        task=task,
        prompt_tokens=_token_bytes(prompt_tokens),
        completions=[
            rollout_pb2.PartialCompletion()
            if completion is None
            else rollout_pb2.PartialCompletion(
                **_completion_fields(completion), stop=completion.stop or ""
            )
            for completion in completions
        ],
    )


def prefixes_of(
    partial: rollout_pb2.PartialGroup,
    lease: rollout_pb2.Lease,
    prompt_tokens: NDArray[np.int32],
    *,
    max_tokens: int,
    version: int,
) -> tuple[Completion | None, ...]:
    """The prefix of each completion of the lease; empty if there is none at all. Raises Invalid.

    ``version``: that the engine serves.
    """
    count = lease.group_size
    if len(partial.completions) != count or partial.prompt_tokens != _token_bytes(prompt_tokens):
        return ()
    prefixes = tuple(_prefix(c, lease, max_tokens, version) for c in partial.completions)
    return prefixes if any(prefixes) else ()


def _prefix(
    completion: rollout_pb2.PartialCompletion,
    lease: rollout_pb2.Lease,
    max_tokens: int,
    version: int,
) -> Completion | None:
    tokens = np.frombuffer(completion.tokens, dtype="<i4")
    spans = version_spans(completion, len(tokens), newest=ANY)
    logprobs = np.frombuffer(completion.logprobs, dtype="<f4")
    check_logprobs(logprobs)
    finish, stop = _FINISH_OF[completion.finish_reason], completion.stop or None
    if not spans or spans[0][0] < lease.oldest_fresh or spans[-1][0] < lease.newest_fresh:
        return None
    # Versions never fall within a completion, and this engine may be behind.
    usable = [(v, length) for v, length in spans if v <= version]
    if finish is Finish.PARTIAL or usable != spans:
        spans, finish, stop = usable, Finish.PARTIAL, None
    count = sum(length for _, length in spans)
    if not count:
        return None
    if count > max_tokens:
        # The limit was lowered since: a longer completion would be refused.
        spans, count, finish, stop = _first(spans, max_tokens), max_tokens, Finish.LENGTH, None
    elif finish is Finish.PARTIAL and count == max_tokens:
        finish = Finish.LENGTH
    return Completion(
        tokens[:count].astype(np.int32),
        logprobs[:count].astype(np.float32),
        tuple(spans),
        finish,
        stop,
    )


def _first(spans: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The (version, length) spans of the first ``count`` tokens."""
    first = []
    for version, length in spans:
        taken = min(length, count)
        count -= taken
        if taken:
            first.append((version, taken))
    return first


def text_of(completion: Completion, text: str) -> str:
    """The completion's text for rewards: without the stop string and what follows it."""
    if completion.stop is None:
        return text
    at = text.find(completion.stop)
    return text if at < 0 else text[:at]
