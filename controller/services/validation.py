"""Checks at the door: a message is looked at in full before the ledger hears of it.

``Invalid`` refuses a whole request, ``InvalidGroup`` one group of a submission. Either way nothing
has changed. Messages say which field, what is wrong with it, and what was expected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.ledger.commands import GroupFacts, StatValue
from paceline.config.model_config import vocabulary_size
from paceline.config.schema import Config
from paceline.ids import TaskId, Version
from paceline.rpc.wire_limits import MAX_REWARD, usable_reward
from paceline.v1 import common_pb2, rollout_pb2

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


class Invalid(ValueError):
    """The request is malformed."""


class InvalidGroup(ValueError):
    """The group is malformed."""


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What the config says of every group."""

    group_size: int
    max_sequence_tokens: int
    """Longest prompt or completion, environment tokens included."""
    vocabulary: int | None = None
    """Token ids are below it; None: not known here."""

    @classmethod
    def of(cls, config: Config) -> GroupLimits:
        rollout = config.rollout
        longest = rollout.max_context or config.data.max_prompt_tokens + rollout.max_tokens
        return cls(rollout.group_size, longest, vocabulary_size(config.model.path))


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
    """Seconds a request may be held."""
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


def check_text(text: str, field: str, limit: int = 4096) -> str:
    if len(text) > limit:
        raise Invalid(f"{field} is longer than {limit} characters")
    return text


def check_stats(stats: Mapping[str, common_pb2.Stat]) -> dict[str, StatValue]:
    if len(stats) > MAX_STATS:
        raise Invalid(f"more than {MAX_STATS} stats")
    checked = {}
    for name, stat in stats.items():
        if not NAME.fullmatch(name):
            raise Invalid(f"stat name {name[:80]!r} is malformed")
        if not (math.isfinite(stat.sum) and math.isfinite(stat.max) and stat.weight >= 0):
            raise Invalid(f"stat {name} is not finite: sum {stat.sum}, max {stat.max}")
        if not math.isfinite(stat.weight):
            raise Invalid(f"stat {name} has weight {stat.weight}")
        checked[name] = StatValue(stat.sum, stat.weight, stat.max)
    return checked


def check_group(group: rollout_pb2.Group, limits: GroupLimits, newest_version: int) -> GroupFacts:
    """What the ledger needs of a group, after every byte that will be trained on was checked.

    Tokens are int32 and not negative; log-probs float32, finite, at most 0; version spans cover the
    tokens, never fall and name versions that exist. Raises InvalidGroup.
    """
    task_id, attempt = check_task(group.task)
    train = task_id[0] == "t"
    if group.kind != (rollout_pb2.TASK_KIND_TRAIN if train else rollout_pb2.TASK_KIND_EVAL):
        raise InvalidGroup(f"kind does not fit task {task_id}")
    wanted = limits.group_size if train else 1
    completions = group.completions
    if len(completions) != wanted:
        raise InvalidGroup(f"{len(completions)} completions; {wanted} were requested")
    prompt_tokens = _token_count(group.prompt_tokens, "prompt_tokens", limits)
    tokens: list[bytes] = [group.prompt_tokens]
    logprobs: list[bytes] = []
    rewards: list[float] = []
    trainable = 0
    version_sum = 0.0
    lowest, highest = newest_version, 0
    for number, completion in enumerate(completions):
        buffer = completion.tokens
        count = _token_count(buffer, f"completions[{number}].tokens", limits)
        scores = completion.logprobs
        if len(scores) != len(buffer):
            raise InvalidGroup(
                f"completions[{number}]: {count} tokens but {len(scores) / 4:g} log-probs"
            )
        tokens.append(buffer)
        logprobs.append(scores)
        rewards.append(completion.reward)
        spans = _spans(completion.versions, count, newest_version, number)
        lowest = min(lowest, spans[0][0])
        highest = max(highest, spans[-1][0])
        if completion.loss_mask:
            mask = _loss_mask(completion.loss_mask, count, number)
            versions = np.repeat([v for v, _ in spans], [length for _, length in spans])
            trainable += int(mask.sum())
            version_sum += float(versions[mask].sum())
        else:
            trainable += count
            version_sum += sum(version * length for version, length in spans)
        _check_extras(completion, number)
    _check_numbers(tokens, logprobs, rewards, limits)
    if not (0 <= group.generate_s < math.inf and 0 <= group.reward_s < math.inf):
        raise InvalidGroup("generate_s and reward_s must be finite and not negative")
    if len(group.prompt_text) > MAX_TEXT:
        raise InvalidGroup(f"prompt_text is longer than {MAX_TEXT} characters")
    if train and trainable == 0:
        raise InvalidGroup("loss_mask leaves no token to train on")
    mean = sum(rewards) / len(rewards)
    return GroupFacts(
        task_id=task_id,
        attempt=attempt,
        sequences=len(completions),
        prompt_tokens=prompt_tokens,
        tokens=trainable,
        min_version=Version(lowest),
        max_version=Version(highest),
        reward_mean=mean,
        reward_std=_std(rewards, mean),
        reward_max=max(rewards),
        generate_s=group.generate_s,
        reward_s=group.reward_s,
        version_sum=version_sum,
    )


def _std(rewards: Sequence[float], mean: float) -> float:
    """Exactly 0 for equal rewards: the mean of eight times 0.1 is not quite 0.1."""
    if min(rewards) == max(rewards):
        return 0.0
    return math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))


def check_partial(group: rollout_pb2.PartialGroup, limits: GroupLimits, newest: int) -> int:
    """Tokens of a partial group, after the same checks as of a finished one. Raises InvalidGroup."""
    task_id, _ = check_task(group.task)
    wanted = limits.group_size if task_id[0] == "t" else 1
    if len(group.completions) != wanted:
        raise InvalidGroup(f"{len(group.completions)} completions; {wanted} were requested")
    _token_count(group.prompt_tokens, "prompt_tokens", limits)
    total = 0
    tokens, logprobs = [group.prompt_tokens], []
    for number, completion in enumerate(group.completions):
        if completion.finish_reason not in rollout_pb2.FinishReason.values():
            raise InvalidGroup(f"completions[{number}]: finish_reason is unknown")
        if len(completion.logprobs) != len(completion.tokens):
            raise InvalidGroup(f"completions[{number}]: tokens and log-probs differ in number")
        check_text(completion.stop, f"completions[{number}].stop")
        count = 0
        if completion.tokens:
            count = _token_count(completion.tokens, f"completions[{number}].tokens", limits)
            tokens.append(completion.tokens)
            logprobs.append(completion.logprobs)
        _spans(completion.versions, count, newest, number)
        total += count
    if not total:
        raise InvalidGroup("a partial group without a token")
    _check_numbers(tokens, logprobs, [], limits)
    return total


def _token_count(buffer: bytes, field: str, limits: GroupLimits) -> int:
    count, rest = divmod(len(buffer), 4)
    if rest or not count:
        raise InvalidGroup(f"{field}: {len(buffer)} bytes are not one or more int32 tokens")
    if count > limits.max_sequence_tokens:
        raise InvalidGroup(f"{field}: {count} tokens, at most {limits.max_sequence_tokens} allowed")
    return count


def _spans(
    given: Sequence[common_pb2.VersionSpan], tokens: int, newest: int, number: int
) -> list[tuple[int, int]]:
    """(version, length) of each span, checked."""
    # Before anything is built of them: a message may hold a million.
    if len(given) > tokens:
        raise InvalidGroup(f"completions[{number}]: {len(given)} version spans, {tokens} tokens")
    spans = [(span.version, span.length) for span in given]
    covered = 0
    last = 0
    for version, length in spans:
        if not last <= version <= newest:
            raise InvalidGroup(
                f"completions[{number}]: version {version} after {last}, newest is {newest}"
            )
        if length < 1:
            raise InvalidGroup(f"completions[{number}]: an empty version span")
        last = version
        covered += length
    if covered != tokens:
        raise InvalidGroup(
            f"completions[{number}]: version spans cover {covered} of {tokens} tokens"
        )
    return spans


def _loss_mask(
    buffer: bytes, tokens: int, number: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if len(buffer) != tokens:
        raise InvalidGroup(f"completions[{number}]: loss_mask of {len(buffer)}, tokens {tokens}")
    values = np.frombuffer(buffer, dtype=np.uint8)
    if values.max() > 1:
        raise InvalidGroup(f"completions[{number}]: loss_mask has values other than 0 and 1")
    return values.astype(np.bool_)


def _check_extras(completion: rollout_pb2.Completion, number: int) -> None:
    if completion.finish_reason not in (
        rollout_pb2.FINISH_REASON_STOP,
        rollout_pb2.FINISH_REASON_LENGTH,
    ):
        raise InvalidGroup(f"completions[{number}]: finish_reason is missing")
    components = completion.reward_components
    if components:
        if len(components) > MAX_COMPONENTS:
            raise InvalidGroup(f"completions[{number}]: over {MAX_COMPONENTS} reward components")
        for name, value in components.items():
            if not usable_reward(value):
                raise InvalidGroup(f"completions[{number}]: reward component {name[:64]} = {value}")
    if len(completion.text) > MAX_TEXT:
        raise InvalidGroup(f"completions[{number}]: text is longer than {MAX_TEXT} characters")


def _check_numbers(
    tokens: list[bytes], logprobs: list[bytes], rewards: list[float], limits: GroupLimits
) -> None:
    """One pass over all buffers of the group: per completion it would cost several times more."""
    # As unsigned, a negative id is a huge one: one comparison finds both.
    largest = int(np.frombuffer(b"".join(tokens), dtype="<u4").max())
    if largest >= (limits.vocabulary or 1 << 31):
        raise InvalidGroup(
            f"a token id is negative or not below {limits.vocabulary}, the vocabulary"
        )
    scores = np.frombuffer(b"".join(logprobs), dtype="<f4")
    # A NaN makes both comparisons false.
    if not (scores.max() <= LOGPROB_CEILING and scores.min() > -math.inf):
        raise InvalidGroup("log-probs must be finite and at most 0")
    for reward in rewards:
        if not usable_reward(reward):
            raise InvalidGroup(f"reward is {reward}: at most {MAX_REWARD:g} in magnitude")
