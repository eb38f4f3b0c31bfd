"""Request validation: every field of a message is checked before the ledger sees the request. An
error names the field, its fault, and the values that are allowed.

The controller never sees a group's payload, only a worker's metadata. Policy ranks compare its
digest with the payload. Here its fields must be possible, and agree with one another."""

import math
import re
from collections.abc import Mapping, Sequence, Sized

from controller.ledger.commands import StatValue
from controller.ledger.specs import GroupMeta
from paceline.ids import Version
from paceline.payloads.group_limits import (
    MAX_REWARD,
    GroupLimits,
    Invalid,
    check_task,
    check_text,
    usable_reward,
)
from paceline.v1 import common_pb2, rollout_pb2

WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
NAME = re.compile(r"[A-Za-z0-9_./:-]{1,64}")

MAX_WAIT_S = 30.0
MAX_TASKS = 1024
MAX_STATS = 128


def check_caller(caller: common_pb2.Caller) -> tuple[str, int]:
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


def check_request_id(request_id: str) -> str:
    if not REQUEST_ID.fullmatch(request_id):
        raise Invalid("request_id must be 1 to 128 printable characters without blanks")
    return request_id


def check_count(items: Sized, what: str, limit: int) -> None:
    if len(items) > limit:
        raise Invalid(f"more than {limit} {what} in one request")


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


DIGEST = re.compile("[0-9a-f]{32}")
MOST_PROMPT_CUT = 1 << 31


def check_meta(meta: rollout_pb2.GroupMeta, limits: GroupLimits, newest_version: int) -> GroupMeta:
    """The metadata as the ledger keeps it. Raises Invalid."""
    task_id, attempt = check_task(meta.task)
    train = task_id[0] == "t"
    if meta.kind != (rollout_pb2.TASK_KIND_TRAIN if train else rollout_pb2.TASK_KIND_EVAL):
        raise Invalid(f"kind does not fit task {task_id}")
    if train and not DIGEST.fullmatch(meta.digest):
        raise Invalid(f"digest {meta.digest[:64]!r} is invalid: expected 32 hexadecimal digits")
    if not (0 <= meta.generate_s < math.inf and 0 <= meta.reward_s < math.inf):
        raise Invalid("generate_s and reward_s must be finite and not negative")
    if not 1 <= meta.prompt_tokens <= limits.max_sequence_tokens:
        raise Invalid(
            f"prompt_tokens: {meta.prompt_tokens} tokens, at most {limits.max_sequence_tokens} "
            "allowed"
        )
    if meta.prompt_cut > MOST_PROMPT_CUT:
        raise Invalid(f"prompt_cut is {meta.prompt_cut}")
    _check_sequences(meta, limits, train=train)
    tokens = _check_versions(meta, newest_version)
    if train and tokens == 0:
        raise Invalid("loss_mask leaves no token to train on")
    rewards = list(meta.rewards)
    mean = sum(rewards) / len(rewards)
    return GroupMeta(
        task_id=task_id,
        attempt=attempt,
        sequences=len(meta.lengths),
        prompt_tokens=meta.prompt_tokens,
        tokens=tokens,
        min_version=Version(meta.min_version),
        max_version=Version(meta.max_version),
        reward_mean=mean,
        reward_std=_std(rewards, mean),
        reward_max=max(rewards),
        generate_s=meta.generate_s,
        reward_s=meta.reward_s,
        token_versions=tuple((Version(s.version), s.length) for s in meta.token_versions),
        sequence_versions=tuple(
            (tuple(map(Version, each.versions)), each.sequences) for each in meta.sequence_versions
        ),
        lengths=tuple(meta.lengths),
        rewards=() if train else tuple(rewards),
        answers=() if train else tuple(meta.answers),
        truncated=0 if train else meta.truncated,
        prompt_cut=meta.prompt_cut,
        digest=meta.digest if train else "",
    )


def _check_sequences(meta: rollout_pb2.GroupMeta, limits: GroupLimits, *, train: bool) -> None:
    count = len(meta.lengths)
    if train and count != limits.group_size:
        raise Invalid(f"{count} completions; {limits.group_size} were requested")
    if not train and not 1 <= count <= limits.eval_samples:
        raise Invalid(f"{count} completions; an evaluation takes 1 to {limits.eval_samples}")
    if len(meta.rewards) != count or len(meta.answers) not in (0, count):
        raise Invalid(
            f"{count} lengths, {len(meta.rewards)} rewards and {len(meta.answers)} answers: one "
            "each, or no answers"
        )
    lengths, rewards = list(meta.lengths), list(meta.rewards)
    most = limits.max_sequence_tokens
    if min(lengths) < 1 or max(lengths) > most:
        number = next(n for n, length in enumerate(lengths) if not 1 <= length <= most)
        raise Invalid(f"lengths[{number}]: {lengths[number]} tokens, at most {most} allowed")
    if not all(map(usable_reward, rewards)):
        number = next(n for n, reward in enumerate(rewards) if not usable_reward(reward))
        raise Invalid(
            f"rewards[{number}] is {rewards[number]}: at most {MAX_REWARD:g} in magnitude"
        )
    for answer in meta.answers:
        check_text(answer, "answers")
    if meta.truncated > count:
        raise Invalid(f"{meta.truncated} of {count} sequences truncated")


def _check_versions(meta: rollout_pb2.GroupMeta, newest: int) -> int:
    """The number of trainable tokens. Checks that versions exist, rise, and add up."""
    if not 0 <= meta.min_version <= meta.max_version <= newest:
        raise Invalid(f"versions {meta.min_version} to {meta.max_version}, newest is {newest}")
    within = meta.min_version, meta.max_version
    versions = [span.version for span in meta.token_versions]
    tokens = [span.length for span in meta.token_versions]
    _check_rising(versions, "token_versions", within)
    if min(tokens, default=1) < 1:
        raise Invalid("token_versions: a version without a token")
    total = int(sum(tokens))
    if total > sum(meta.lengths):
        raise Invalid(f"token_versions: {total} tokens of {sum(meta.lengths)}")
    sequences = 0
    for each in meta.sequence_versions:
        _check_rising(each.versions, "sequence_versions", within)
        if not each.versions or each.sequences < 1:
            raise Invalid("sequence_versions: no version, or no sequence")
        sequences += each.sequences
    if sequences > len(meta.lengths):
        raise Invalid(f"sequence_versions: {sequences} sequences of {len(meta.lengths)}")
    if {v for each in meta.sequence_versions for v in each.versions} != set(versions):
        raise Invalid("token_versions and sequence_versions name other versions")
    return total


def _check_rising(versions: Sequence[int], field: str, within: tuple[int, int]) -> None:
    oldest, newest = within
    last = oldest - 1
    for version in versions:
        if not last < version <= newest:
            raise Invalid(f"{field}: version {version} after {last}, of {oldest} to {newest}")
        last = version


def _std(rewards: Sequence[float], mean: float) -> float:
    """Standard deviation of a sample, as in advantages; exactly 0 for equal rewards, whose mean may
    be rounded."""
    if min(rewards) == max(rewards):
        return 0.0
    return math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
