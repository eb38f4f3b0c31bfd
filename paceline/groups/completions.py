"""Checks that finished and unfinished completions share: tokens, log-probs, version spans.

An error names the field, its fault, and the values that are allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.groups.invalid import Invalid
from paceline.groups.limits import GroupLimits
from paceline.ids import TaskId
from paceline.v1 import common_pb2, rollout_pb2

T = TypeVar("T")

TASK_ID = re.compile(r"t\d{1,15}|e\d{1,9}\.\d{1,9}")
LOGPROB_CEILING = 1e-3
"""Log-probabilities are at most 0; rounding may lift them by this much."""


def check_task(task: common_pb2.TaskRef) -> tuple[TaskId, int]:
    if not TASK_ID.fullmatch(task.task_id):
        raise Invalid(f"task.task_id {task.task_id[:80]!r} is not a task id")
    if task.attempt < 1:
        raise Invalid(f"task.attempt of {task.task_id} must be 1 or more")
    return TaskId(task.task_id), task.attempt


def check_text(text: str, field: str, limit: int = 4096) -> str:
    if len(text) > limit:
        raise Invalid(f"{field} is longer than {limit} characters")
    return text


def each_sequence(
    group: rollout_pb2.Group,
    limits: GroupLimits,
    newest: int,
    check: Callable[[Any, GroupLimits, int], T],
) -> list[T]:
    """The result of ``check`` for each completion of the group."""
    count = len(group.completions)
    if group.task.task_id[0] == "t" and count != limits.group_size:
        raise Invalid(f"{count} completions; {limits.group_size} were requested")
    most = limits.group_size if group.task.task_id[0] == "t" else limits.eval_samples
    if not 1 <= count <= most:
        raise Invalid(f"{count} completions; an evaluation takes 1 to {limits.eval_samples}")
    token_count(group.prompt_tokens, "prompt_tokens", limits)
    found = []
    for number, completion in enumerate(group.completions):
        try:
            found.append(check(completion, limits, newest))
        except Invalid as error:
            raise Invalid(f"completions[{number}]: {error}") from None
    return found


def token_count(buffer: bytes, field: str, limits: GroupLimits) -> int:
    count, rest = divmod(len(buffer), 4)
    if rest or not count:
        raise Invalid(f"{field}: {len(buffer)} bytes are not one or more int32 tokens")
    if count > limits.max_sequence_tokens:
        raise Invalid(f"{field}: {count} tokens, at most {limits.max_sequence_tokens} allowed")
    return count


def version_spans(
    completion: rollout_pb2.Completion | rollout_pb2.PartialCompletion, tokens: int, newest: int
) -> list[tuple[int, int]]:
    """(version, length) of each span. Spans and log-probs must fit the number of tokens."""
    if len(completion.logprobs) != 4 * tokens:
        raise Invalid(f"{tokens} tokens but {len(completion.logprobs) / 4:g} log-probs")
    versions = completion.versions
    # Checked before the list is built: a message may contain a million spans.
    if len(versions) > tokens:
        raise Invalid(f"{len(versions)} version spans, {tokens} tokens")
    spans = [(span.version, span.length) for span in versions]
    last = covered = 0
    for version, length in spans:
        if not last <= version <= newest:
            raise Invalid(f"version {version} after {last}, newest is {newest}")
        if length < 1:
            raise Invalid("an empty version span")
        last = version
        covered += length
    if covered != tokens:
        raise Invalid(f"version spans cover {covered} of {tokens} tokens")
    return spans


def check_numbers(group: rollout_pb2.Group, limits: GroupLimits) -> None:
    """Checks all completions in one pass, which is several times faster than one pass for each."""
    tokens = b"".join([group.prompt_tokens, *[c.tokens for c in group.completions]])
    # Read as unsigned, a negative id is huge: one comparison finds negative and too large ids.
    if np.frombuffer(tokens, dtype="<u4").max() >= (limits.vocabulary or 1 << 31):
        raise Invalid(f"a token id is negative or not below {limits.vocabulary}, the vocabulary")
    check_logprobs(np.frombuffer(b"".join([c.logprobs for c in group.completions]), dtype="<f4"))


def check_logprobs(logprobs: NDArray[np.float32]) -> None:
    # A NaN makes both comparisons false.
    if len(logprobs) and not (logprobs.max() <= LOGPROB_CEILING and logprobs.min() > -math.inf):
        raise Invalid("log-probs must be finite and at most 0")
