"""Request validation: every field of a message is checked before the ledger sees the request.

An error names the field, its fault, and the values that are allowed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from controller.ledger.commands import GroupFacts, StatValue
from paceline.config.model_config import vocabulary_size
from paceline.config.schema import Config
from paceline.ids import TaskId, Version
from paceline.rpc.wire_limits import MAX_REWARD, usable_reward
from paceline.v1 import common_pb2, rollout_pb2

T = TypeVar("T")

WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
TASK_ID = re.compile(r"t\d{1,15}|e\d{1,9}\.\d{1,9}")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
NAME = re.compile(r"[A-Za-z0-9_./:-]{1,64}")

LOGPROB_CEILING = 1e-3
"""Log-probabilities are at most 0; rounding may lift them by this much."""
MAX_WAIT_S = 30.0
MAX_TASKS = 1024
MAX_STATS = 128
MAX_COMPONENTS = 64
MAX_TEXT = 1 << 20
_TRUNCATED = rollout_pb2.FINISH_REASON_LENGTH
FINISHED = (rollout_pb2.FINISH_REASON_STOP, rollout_pb2.FINISH_REASON_LENGTH)


class Invalid(ValueError):
    """The request, or one group in it, is malformed. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits that the config sets for every group."""

    group_size: int
    max_sequence_tokens: int
    """Longest prompt or completion, environment tokens included."""
    vocabulary: int | None = None
    """Token ids must be below it. None: this controller does not know the vocabulary."""
    eval_samples: int = 1
    """Most completions of an evaluation's prompt; the ledger knows those of each set."""
    columns: frozenset[str] = frozenset()
    """Scorers whose log-probs every completion to train has."""

    @classmethod
    def of(cls, config: Config) -> GroupLimits:
        vocabulary = vocabulary_size(config.model.path)
        samples = max((each.samples for each in config.evaluation.sets.values()), default=1)
        columns = {
            n
            for n, s in config.scorers.by_name.items()
            if s.kind == "logprobs" and not config.recorded
        }
        longest = config.longest_sequence
        return cls(config.rollout.group_size, longest, vocabulary, samples, frozenset(columns))


def check_caller(caller: common_pb2.Caller) -> tuple[str, int]:
    """(worker id, incarnation)."""
    if not WORKER_ID.fullmatch(caller.worker_id):
        raise Invalid(
            "caller.worker_id must be 1 to 64 letters, digits, '-', '_' or '.', beginning with a "
            f"letter or digit, not {caller.worker_id[:80]!r}"
        )
    if not 0 < caller.incarnation < 1 << 63:
        raise Invalid("caller.incarnation must be between 1 and 2^63 - 1: draw it at random")
    return caller.worker_id, caller.incarnation


def check_wait(wait_s: float) -> float:
    """Seconds for which the controller may hold the request. Raises Invalid."""
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise Invalid(f"wait_s must be 0 to {MAX_WAIT_S:g}, not {wait_s}")
    return wait_s


def check_task(task: common_pb2.TaskRef) -> tuple[TaskId, int]:
    if not TASK_ID.fullmatch(task.task_id):
        raise Invalid(f"task.task_id {task.task_id[:80]!r} is not a task id")
    if task.attempt < 1:
        raise Invalid(f"task.attempt of {task.task_id} must be 1 or more")
    return TaskId(task.task_id), task.attempt


def check_request_id(request_id: str) -> str:
    if not REQUEST_ID.fullmatch(request_id):
        raise Invalid("request_id must be 1 to 128 printable characters without blanks")
    return request_id


def check_count(items: Sized, what: str, limit: int) -> None:
    if len(items) > limit:
        raise Invalid(f"more than {limit} {what} in one request")


def check_text(text: str, field: str, limit: int = 4096) -> str:
    if len(text) > limit:
        raise Invalid(f"{field} is longer than {limit} characters")
    return text


def check_stats(stats: Mapping[str, common_pb2.Stat]) -> dict[str, StatValue]:
    check_count(stats, "stats", MAX_STATS)
    checked = {}
    for name, stat in stats.items():
        if not NAME.fullmatch(name):
            raise Invalid(f"stat name {name[:80]!r} is malformed")
        if not (math.isfinite(stat.sum) and math.isfinite(stat.max)):
            raise Invalid(f"stat {name} is not finite: sum {stat.sum}, max {stat.max}")
        if not 0 <= stat.weight < math.inf:
            raise Invalid(f"stat {name} has weight {stat.weight}")
        checked[name] = StatValue(stat.sum, stat.weight, stat.max)
    return checked


def check_group(group: rollout_pb2.Group, limits: GroupLimits, newest_version: int) -> GroupFacts:
    """Checks all data of a group that will be trained on, and returns the facts for the ledger.

    Tokens are int32 and not negative; log-probs float32, finite, at most 0; version spans cover the
    tokens, never fall and name versions that exist. Raises Invalid.
    """
    task_id, attempt = check_task(group.task)
    train = task_id[0] == "t"
    if group.kind != (rollout_pb2.TASK_KIND_TRAIN if train else rollout_pb2.TASK_KIND_EVAL):
        raise Invalid(f"kind does not fit task {task_id}")
    if not (0 <= group.generate_s < math.inf and 0 <= group.reward_s < math.inf):
        raise Invalid("generate_s and reward_s must be finite and not negative")
    if len(group.prompt_text) > MAX_TEXT:
        raise Invalid(f"prompt_text is longer than {MAX_TEXT} characters")
    sequences = _sequences(group, limits, newest_version, _check_finished)
    trainable = sum(sequence.trainable for sequence in sequences)
    if train and (missing := [c for c in group.completions if limits.columns - c.columns.keys()]):
        names = ", ".join(sorted(limits.columns - missing[0].columns.keys()))
        raise Invalid(f"{len(missing)} completions have no log-probs of the scorer {names}")
    if train and trainable == 0:
        raise Invalid("loss_mask leaves no token to train on")
    _check_numbers(group, limits)
    rewards = [completion.reward for completion in group.completions]
    mean = sum(rewards) / len(rewards)
    return GroupFacts(
        task_id=task_id,
        attempt=attempt,
        sequences=len(sequences),
        prompt_tokens=len(group.prompt_tokens) // 4,
        tokens=trainable,
        min_version=Version(min(sequence.oldest for sequence in sequences)),
        max_version=Version(max(sequence.newest for sequence in sequences)),
        reward_mean=mean,
        reward_std=_std(rewards, mean),
        reward_max=max(rewards),
        generate_s=group.generate_s,
        reward_s=group.reward_s,
        token_versions=_by_version(sequences),
        sequence_versions=_sequences_by_versions(sequences),
        lengths=tuple(len(completion.tokens) // 4 for completion in group.completions),
        rewards=() if train else tuple(rewards),
        answers=() if train else tuple(completion.answer for completion in group.completions),
        truncated=0 if train else sum(c.finish_reason == _TRUNCATED for c in group.completions),
        prompt_cut=group.prompt_cut,
    )


def check_partial(group: rollout_pb2.PartialGroup, limits: GroupLimits, newest: int) -> int:
    """Number of tokens in a report of a partial group, after the checks of a finished one. Raises Invalid."""
    check_task(group.task)
    if group.offset and group.prompt_tokens:
        raise Invalid("prompt_tokens belong to the report with offset 0")
    total = sum(_sequences(group, limits, newest, _check_unfinished))
    if not total and not (group.offset and any(c.finish_reason for c in group.completions)):
        raise Invalid("a partial group without a token")
    most = limits.max_sequence_tokens * len(group.completions)
    if group.offset + total > most:
        raise Invalid(f"{group.offset + total} tokens; the task has at most {most}")
    if total:
        _check_numbers(group, limits)
    return total


def _std(rewards: Sequence[float], mean: float) -> float:
    """Standard deviation; exactly 0 for equal rewards, whose mean may be rounded."""
    if min(rewards) == max(rewards):
        return 0.0
    return math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))


def _sequences(
    group: rollout_pb2.Group | rollout_pb2.PartialGroup,
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
    if not getattr(group, "offset", 0):
        _token_count(group.prompt_tokens, "prompt_tokens", limits)
    found = []
    for number, completion in enumerate(group.completions):
        try:
            found.append(check(completion, limits, newest))
        except Invalid as error:
            raise Invalid(f"completions[{number}]: {error}") from None
    return found


class _Finished(NamedTuple):
    """Contribution of a finished completion to the facts of its group."""

    trainable: int
    """Number of tokens that the loss mask does not exclude."""
    by_version: list[tuple[int, int]]
    """(version, number of these tokens); may name a version twice, or with 0 tokens."""
    oldest: int
    newest: int


def _check_finished(
    completion: rollout_pb2.Completion, limits: GroupLimits, newest: int
) -> _Finished:
    count = _token_count(completion.tokens, "tokens", limits)
    spans = _spans(completion, count, newest)
    if completion.finish_reason not in FINISHED:
        raise Invalid("finish_reason is missing")
    if not usable_reward(completion.reward):
        raise Invalid(f"reward is {completion.reward}: at most {MAX_REWARD:g} in magnitude")
    if components := completion.reward_components:
        if len(components) > MAX_COMPONENTS:
            raise Invalid(f"over {MAX_COMPONENTS} reward components")
        for name, value in components.items():
            if not usable_reward(value):
                raise Invalid(f"reward component {name[:64]} = {value}")
    if completion.token_rewards:
        _check_token_rewards(completion, count)
    check_text(completion.text, "text", MAX_TEXT)
    check_text(completion.answer, "answer")
    _check_columns(completion.columns, count)
    trainable = count
    first, last = spans[0][0], spans[-1][0]
    if completion.loss_mask:
        mask = _loss_mask(completion.loss_mask, count)
        versions = np.repeat([v for v, _ in spans], [length for _, length in spans])
        trainable = int(mask.sum())
        found, counts = np.unique(versions[mask], return_counts=True)
        spans = list(zip(found.tolist(), counts.tolist(), strict=True))
    return _Finished(trainable, spans, first, last)


def _check_token_rewards(completion: rollout_pb2.Completion, count: int) -> None:
    last = -1
    for found in completion.token_rewards:
        if not last < found.token < count:
            raise Invalid(
                f"token_rewards: token {found.token} after {last}, of {count} tokens: name each at most once, in "
                "rising order"
            )
        if not usable_reward(found.reward):
            raise Invalid(
                f"token_rewards: {found.reward} for token {found.token}: at most {MAX_REWARD:g} in magnitude"
            )
        last = found.token


def _check_columns(columns: Mapping[str, bytes], tokens: int) -> None:
    for name, column in columns.items():
        if len(column) != 4 * tokens:
            raise Invalid(f"column {name[:64]} of {len(column) / 4:g}, tokens {tokens}")
        if not np.isfinite(np.frombuffer(column, "<f4")).all():
            raise Invalid(f"column {name[:64]} has numbers that are not finite")


def _by_version(sequences: Sequence[_Finished]) -> tuple[tuple[Version, int], ...]:
    """(version, trainable tokens) of the whole group, oldest first."""
    total: dict[int, int] = {}
    for sequence in sequences:
        for version, count in sequence.by_version:
            total[version] = total.get(version, 0) + count
    return tuple((Version(version), n) for version, n in sorted(total.items()))


def _sequences_by_versions(
    sequences: Sequence[_Finished],
) -> tuple[tuple[tuple[Version, ...], int], ...]:
    """(versions of a sequence's trainable tokens, number of such sequences), in order."""
    found = Counter(tuple(sorted({v for v, n in s.by_version if n})) for s in sequences)
    found.pop((), None)
    return tuple((tuple(map(Version, each)), n) for each, n in sorted(found.items()))


def _check_unfinished(
    completion: rollout_pb2.PartialCompletion, limits: GroupLimits, newest: int
) -> int:
    """Number of tokens; it may be 0."""
    if completion.finish_reason not in rollout_pb2.FinishReason.values():
        raise Invalid("finish_reason is unknown")
    check_text(completion.stop, "stop")
    count = _token_count(completion.tokens, "tokens", limits) if completion.tokens else 0
    _spans(completion, count, newest)
    return count


def _token_count(buffer: bytes, field: str, limits: GroupLimits) -> int:
    count, rest = divmod(len(buffer), 4)
    if rest or not count:
        raise Invalid(f"{field}: {len(buffer)} bytes are not one or more int32 tokens")
    if count > limits.max_sequence_tokens:
        raise Invalid(f"{field}: {count} tokens, at most {limits.max_sequence_tokens} allowed")
    return count


def _spans(
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


def _loss_mask(buffer: bytes, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if len(buffer) != tokens:
        raise Invalid(f"loss_mask of {len(buffer)}, tokens {tokens}")
    values = np.frombuffer(buffer, dtype=np.uint8)
    if values.max() > 1:
        raise Invalid("loss_mask has values other than 0 and 1")
    return values.astype(np.bool_)


def _check_numbers(
    group: rollout_pb2.Group | rollout_pb2.PartialGroup, limits: GroupLimits
) -> None:
    """Checks all completions in one pass, which is several times faster than one pass for each."""
    tokens = b"".join([group.prompt_tokens, *[c.tokens for c in group.completions]])
    # Read as unsigned, a negative id is huge: one comparison finds negative and too large ids.
    if np.frombuffer(tokens, dtype="<u4").max() >= (limits.vocabulary or 1 << 31):
        raise Invalid(f"a token id is negative or not below {limits.vocabulary}, the vocabulary")
    scores = np.frombuffer(b"".join([c.logprobs for c in group.completions]), dtype="<f4")
    # A NaN makes both comparisons false.
    if not (scores.max() <= LOGPROB_CEILING and scores.min() > -math.inf):
        raise Invalid("log-probs must be finite and at most 0")
