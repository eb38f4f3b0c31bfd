"""Check of submitted facts: what a worker says of a group whose payload the controller never sees.

Policy ranks compare the facts with the payload. Here they must be possible, and agree with one
another.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from controller.ledger.facts import GroupFacts
from paceline.groups.completions import check_task, check_text
from paceline.groups.invalid import Invalid
from paceline.groups.limits import GroupLimits
from paceline.groups.payload import facts_digest
from paceline.ids import Version
from paceline.rpc.wire_limits import MAX_REWARD, usable_reward
from paceline.v1 import rollout_pb2

DIGEST = re.compile("[0-9a-f]{32}")
MOST_PROMPT_CUT = 1 << 31


def check_facts(
    facts: rollout_pb2.GroupFacts, limits: GroupLimits, newest_version: int
) -> GroupFacts:
    """The facts as the ledger keeps them. Raises Invalid."""
    task_id, attempt = check_task(facts.task)
    train = task_id[0] == "t"
    if facts.kind != (rollout_pb2.TASK_KIND_TRAIN if train else rollout_pb2.TASK_KIND_EVAL):
        raise Invalid(f"kind does not fit task {task_id}")
    if train and not DIGEST.fullmatch(facts.digest):
        raise Invalid(f"digest {facts.digest[:64]!r} is none: 32 hexadecimal digits")
    if not (0 <= facts.generate_s < math.inf and 0 <= facts.reward_s < math.inf):
        raise Invalid("generate_s and reward_s must be finite and not negative")
    if not 1 <= facts.prompt_tokens <= limits.max_sequence_tokens:
        raise Invalid(
            f"prompt_tokens: {facts.prompt_tokens} tokens, at most {limits.max_sequence_tokens} allowed"
        )
    if facts.prompt_cut > MOST_PROMPT_CUT:
        raise Invalid(f"prompt_cut is {facts.prompt_cut}")
    _check_sequences(facts, limits, train=train)
    tokens = _check_versions(facts, newest_version)
    if train and tokens == 0:
        raise Invalid("loss_mask leaves no token to train on")
    rewards = list(facts.rewards)
    mean = sum(rewards) / len(rewards)
    return GroupFacts(
        task_id=task_id,
        attempt=attempt,
        sequences=len(facts.lengths),
        prompt_tokens=facts.prompt_tokens,
        tokens=tokens,
        min_version=Version(facts.min_version),
        max_version=Version(facts.max_version),
        reward_mean=mean,
        reward_std=_std(rewards, mean),
        reward_max=max(rewards),
        generate_s=facts.generate_s,
        reward_s=facts.reward_s,
        token_versions=tuple((Version(s.version), s.length) for s in facts.token_versions),
        sequence_versions=tuple(
            (tuple(map(Version, each.versions)), each.sequences) for each in facts.sequence_versions
        ),
        lengths=tuple(facts.lengths),
        rewards=() if train else tuple(rewards),
        answers=() if train else tuple(facts.answers),
        truncated=0 if train else facts.truncated,
        prompt_cut=facts.prompt_cut,
        digest=facts.digest if train else "",
        facts_digest=facts_digest(facts) if train else "",
    )


def _check_sequences(facts: rollout_pb2.GroupFacts, limits: GroupLimits, *, train: bool) -> None:
    count = len(facts.lengths)
    if train and count != limits.group_size:
        raise Invalid(f"{count} completions; {limits.group_size} were requested")
    if not train and not 1 <= count <= limits.eval_samples:
        raise Invalid(f"{count} completions; an evaluation takes 1 to {limits.eval_samples}")
    if len(facts.rewards) != count or len(facts.answers) not in (0, count):
        raise Invalid(
            f"{count} lengths, {len(facts.rewards)} rewards and {len(facts.answers)} answers: one each, or no answers"
        )
    lengths, rewards = list(facts.lengths), list(facts.rewards)
    most = limits.max_sequence_tokens
    if min(lengths) < 1 or max(lengths) > most:
        number = next(n for n, length in enumerate(lengths) if not 1 <= length <= most)
        raise Invalid(f"lengths[{number}]: {lengths[number]} tokens, at most {most} allowed")
    if not all(map(usable_reward, rewards)):
        number = next(n for n, reward in enumerate(rewards) if not usable_reward(reward))
        raise Invalid(
            f"rewards[{number}] is {rewards[number]}: at most {MAX_REWARD:g} in magnitude"
        )
    for answer in facts.answers:
        check_text(answer, "answers")
    if facts.truncated > count:
        raise Invalid(f"{facts.truncated} of {count} sequences truncated")


def _check_versions(facts: rollout_pb2.GroupFacts, newest: int) -> int:
    """The number of trainable tokens. Versions exist, rise, and are of no more tokens and sequences
    than there are."""
    if not 0 <= facts.min_version <= facts.max_version <= newest:
        raise Invalid(f"versions {facts.min_version} to {facts.max_version}, newest is {newest}")
    within = facts.min_version, facts.max_version
    versions = [span.version for span in facts.token_versions]
    tokens = [span.length for span in facts.token_versions]
    _check_rising(versions, "token_versions", within)
    if min(tokens, default=1) < 1:
        raise Invalid("token_versions: a version without a token")
    total = int(sum(tokens))
    if total > sum(facts.lengths):
        raise Invalid(f"token_versions: {total} tokens of {sum(facts.lengths)}")
    sequences = 0
    for each in facts.sequence_versions:
        _check_rising(each.versions, "sequence_versions", within)
        if not each.versions or each.sequences < 1:
            raise Invalid("sequence_versions: no version, or no sequence")
        sequences += each.sequences
    if sequences > len(facts.lengths):
        raise Invalid(f"sequence_versions: {sequences} sequences of {len(facts.lengths)}")
    if {v for each in facts.sequence_versions for v in each.versions} != set(versions):
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
    """Standard deviation; exactly 0 for equal rewards, whose mean may be rounded."""
    if min(rewards) == max(rewards):
        return 0.0
    return math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
