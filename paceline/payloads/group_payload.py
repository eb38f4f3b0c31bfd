"""The payload of a group and its metadata. Both are made where the group is, once all of it was
checked; a controller checks the metadata, a policy rank compares the payload with them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from paceline.payloads.group_limits import (
    MAX_REWARD,
    GroupLimits,
    Invalid,
    check_task,
    check_text,
    usable_reward,
)
from paceline.payloads.routes import BadRoutes, routes_of
from paceline.payloads.sample_paths import NOTHING, BadPaths, Paths, check_sizes, paths_of
from paceline.v1 import common_pb2, rollout_pb2

LOGPROB_CEILING = 1e-3
"""Log-probabilities are at most 0; rounding may lift them by this much."""


def encode(group: rollout_pb2.Group) -> bytes:
    """The payload of ``group``."""
    return bytes(group.SerializeToString())


def decode(payload: bytes) -> rollout_pb2.Group:
    """The group in ``payload``. Raises google.protobuf's DecodeError."""
    group: rollout_pb2.Group = rollout_pb2.Group.FromString(payload)
    return group


def payload_digest(payload: bytes) -> str:
    """The first 128 bits of the SHA-256 of the bytes, 32 hexadecimal digits: processors have
    instructions for it."""
    return sha256(payload).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """One group, ready to be stored and submitted."""

    meta: rollout_pb2.GroupMeta
    payload: bytes  # Empty for an evaluation, of which nothing is stored


def encode_group(
    group: rollout_pb2.Group, limits: GroupLimits, newest_version: int
) -> EncodedGroup:
    """Checks all of ``group``, as ``check_group`` does, and encodes it. Raises Invalid."""
    meta = check_group(group, limits, newest_version)
    if group.kind == rollout_pb2.TASK_KIND_EVAL:
        return EncodedGroup(meta, b"")
    payload = encode(group)
    meta.digest = payload_digest(payload)
    return EncodedGroup(meta, payload)


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


MAX_COMPONENTS = 64
MOST_PROMPT_CUT = 1 << 31
MOST_ROUTES = 1 << 14
MAX_TEXT = 1 << 20
_TRUNCATED = rollout_pb2.FINISH_REASON_LENGTH
FINISHED = (rollout_pb2.FINISH_REASON_STOP, rollout_pb2.FINISH_REASON_LENGTH)


def check_group(
    group: rollout_pb2.Group, limits: GroupLimits, newest_version: int
) -> rollout_pb2.GroupMeta:
    """Checks all data of a group that will be trained on, and returns its metadata, without the
    payload's digest. Tokens are int32 and not negative; log-probs float32, finite, at most 0;
    version spans cover the tokens, never fall and name versions that exist. Raises Invalid."""
    train = group.task.task_id.startswith("t")
    if len(group.prompt_text) > MAX_TEXT:
        raise Invalid(f"prompt_text is longer than {MAX_TEXT} characters")
    token_count(group.prompt_tokens, "prompt_tokens", limits)
    completions = list(group.completions)
    try:
        paths = paths_of(group)
    except BadPaths as error:
        raise Invalid(str(error)) from None
    tokens: dict[int, int] = {}
    trained: list[set[int]] = []
    for number, completion in enumerate(completions):
        try:
            spans = _check_finished(completion, limits, newest_version)
        except Invalid as error:
            raise Invalid(f"completions[{number}]: {error}") from None
        for version, count in spans:
            tokens[version] = tokens.get(version, 0) + count
        trained.append({version for version, count in spans if count})
    if paths.branched:
        _check_branches(completions, paths)
        if not limits.each_branch:
            trained = [set[int]().union(*trained[part]) for part in paths.samples]
    sequences = Counter(tuple(sorted(versions)) for versions in trained)
    firsts = [c for c in completions if not c.HasField("branch")]
    if train and limits.columns:
        _check_scored(group, limits.columns)
    _check_routes(group)
    check_numbers(group, limits)
    meta = rollout_pb2.GroupMeta(
        task=group.task,
        kind=group.kind,
        prompt_tokens=len(group.prompt_tokens) // 4,
        prompt_cut=group.prompt_cut,
        generate_s=group.generate_s,
        reward_s=group.reward_s,
        min_version=min((c.versions[0].version for c in completions), default=0),
        max_version=max((c.versions[-1].version for c in completions), default=0),
        token_versions=[
            common_pb2.VersionSpan(version=v, length=n) for v, n in sorted(tokens.items()) if n
        ],
        sequence_versions=[
            rollout_pb2.SequenceVersions(versions=versions, sequences=n)
            for versions, n in sorted(sequences.items())
            if versions
        ],
        lengths=[len(completion.tokens) // 4 for completion in completions],
        rewards=[completion.reward for completion in firsts],
        answers=[] if train else [completion.answer for completion in firsts],
        truncated=0 if train else truncated_samples(completions, paths),
        branches=paths.branches if paths.branched else (),
        prefixes=paths.prefixes if paths.branched else (),
    )
    check_consistency(meta, limits, newest_version)
    return meta


def check_consistency(
    meta: rollout_pb2.GroupMeta, limits: GroupLimits, newest_version: int
) -> None:
    """Checks that what ``meta`` says is possible and agrees with itself. Raises Invalid."""
    task_id, _ = check_task(meta.task)
    train = task_id[0] == "t"
    if meta.kind != (rollout_pb2.TASK_KIND_TRAIN if train else rollout_pb2.TASK_KIND_EVAL):
        raise Invalid(f"kind does not fit task {task_id}")
    if not (0 <= meta.generate_s < math.inf and 0 <= meta.reward_s < math.inf):
        raise Invalid("generate_s and reward_s must be finite and not negative")
    most = limits.max_sequence_tokens
    if not 1 <= meta.prompt_tokens <= most:
        raise Invalid(f"prompt_tokens: {meta.prompt_tokens} tokens, at most {most} allowed")
    if meta.prompt_cut > MOST_PROMPT_CUT:
        raise Invalid(f"prompt_cut is {meta.prompt_cut}")
    lengths, rewards = list(meta.lengths), list(meta.rewards)
    try:
        count = check_sizes(meta, most, limits.branches)
    except BadPaths as error:
        raise Invalid(str(error)) from None
    if train and count != limits.group_size:
        raise Invalid(f"{count} samples; {limits.group_size} were requested")
    if not train and not 1 <= count <= limits.eval_samples:
        raise Invalid(f"{count} samples; an evaluation takes 1 to {limits.eval_samples}")
    if len(rewards) != count or len(meta.answers) not in (0, count):
        raise Invalid(
            f"{count} samples, {len(rewards)} rewards and {len(meta.answers)} answers: one each, "
            "or no answers"
        )
    if min(lengths) < 1 or max(lengths) > most:
        raise Invalid(f"lengths {min(lengths)} to {max(lengths)} tokens, 1 to {most} allowed")
    for number, reward in enumerate(rewards):
        if not usable_reward(reward):
            what = f"sample {number}: reward is {reward}"
            raise Invalid(f"{what}: at most {MAX_REWARD:g} in magnitude")
    for answer in meta.answers:
        check_text(answer, "answers")
    if meta.truncated > count:
        raise Invalid(f"{meta.truncated} of {count} samples truncated")
    _check_versions(meta, newest_version, len(lengths) if limits.each_branch else count)
    if train and not meta.token_versions:
        raise Invalid("loss_mask leaves no token to train on")


def _check_versions(meta: rollout_pb2.GroupMeta, newest: int, most: int) -> None:
    """Checks that versions exist, rise, and add up, to ``most`` sequences or samples at most."""
    if not 0 <= meta.min_version <= meta.max_version <= newest:
        raise Invalid(f"versions {meta.min_version} to {meta.max_version}, newest is {newest}")
    versions = [span.version for span in meta.token_versions]
    tokens = [span.length for span in meta.token_versions]
    _check_rising(versions, "token_versions", meta)
    if min(tokens, default=1) < 1 or sum(tokens) > sum(meta.lengths):
        raise Invalid(f"token_versions: {tokens[:64]} tokens of {sum(meta.lengths)}")
    for part in meta.sequence_versions:
        _check_rising(part.versions, "sequence_versions", meta)
        if not part.versions or part.sequences < 1:
            raise Invalid("sequence_versions: no version, or no sequence")
    sequences = sum(part.sequences for part in meta.sequence_versions)
    if sequences > most:
        raise Invalid(f"sequence_versions: {sequences} sequences of {most}")
    if {v for part in meta.sequence_versions for v in part.versions} != set(versions):
        raise Invalid("token_versions and sequence_versions name other versions")


def _check_rising(versions: Sequence[int], field: str, meta: rollout_pb2.GroupMeta) -> None:
    last = meta.min_version - 1
    for version in versions:
        if not last < version <= meta.max_version:
            raise Invalid(
                f"{field}: version {version} after {last}, of {meta.min_version} to "
                f"{meta.max_version}"
            )
        last = version


def truncated_samples(completions: Sequence[rollout_pb2.Completion], paths: Paths) -> int:
    """Samples with a sequence that ended at the limit of tokens."""
    cut = [completion.finish_reason == _TRUNCATED for completion in completions]
    return sum(any(cut[part]) for part in paths.samples)


def _check_branches(completions: Sequence[rollout_pb2.Completion], paths: Paths) -> None:
    """Checks what is said of a whole sample, and that each trained token is predicted."""
    for number, (completion, parent) in enumerate(zip(completions, paths.parents, strict=True)):
        if not completion.HasField("branch"):
            continue
        if completion.reward or completion.reward_components or completion.answer:
            what = f"completions[{number}], a branch, has a reward or an answer"
            raise Invalid(f"{what}: a sample's are on its first sequence")
        if parent == NOTHING and completion.loss_mask[:1] != b"\x00":
            what = f"completions[{number}]: its first token is trained"
            raise Invalid(f"{what}, and nothing is before it: loss_mask must be 0 there")
        if parent == NOTHING and len(completion.tokens) == 4:
            raise Invalid(f"completions[{number}] is a path of one token, which predicts nothing")


def _check_scored(group: rollout_pb2.Group, scorers: Set[str]) -> None:
    if missing := [c for c in group.completions if scorers - c.columns.keys()]:
        names = ", ".join(sorted(scorers - missing[0].columns.keys()))
        raise Invalid(f"{len(missing)} completions have no log-probs of the scorer {names}")


def _check_routes(group: rollout_pb2.Group) -> None:
    """Sizes alone: which experts there are, the trainer knows."""
    noted = group.prompt_routes or any(completion.routes for completion in group.completions)
    if group.routes_width > MOST_ROUTES or (noted and not group.routes_width):
        raise Invalid(f"routes_width is {group.routes_width}, 1 to {MOST_ROUTES} allowed")
    if noted:
        try:
            routes_of(group, group.routes_width)
        except BadRoutes as error:
            raise Invalid(str(error)) from None


def _check_finished(
    completion: rollout_pb2.Completion, limits: GroupLimits, newest: int
) -> list[tuple[int, int]]:
    """(version, trainable tokens of it) of a completion; may name a version twice, or 0 tokens."""
    count = token_count(completion.tokens, "tokens", limits)
    spans = version_spans(completion, count, newest)
    if completion.finish_reason not in FINISHED:
        raise Invalid("finish_reason is missing")
    if components := completion.reward_components:
        if len(components) > MAX_COMPONENTS:
            raise Invalid(f"over {MAX_COMPONENTS} reward components")
        for name in components:
            if not usable_reward(components[name]):
                raise Invalid(f"reward component {name[:64]} = {components[name]}")
    if completion.token_rewards:
        _check_token_rewards(completion, count)
    check_text(completion.text, "text", MAX_TEXT)
    check_text(completion.answer, "answer")
    if completion.columns:
        _check_columns(completion.columns, count)
    if not completion.loss_mask:
        return spans
    mask = _loss_mask(completion.loss_mask, count)
    versions = np.repeat([v for v, _ in spans], [length for _, length in spans])
    found, counts = np.unique(versions[mask], return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def _check_token_rewards(completion: rollout_pb2.Completion, count: int) -> None:
    last = -1
    for found in completion.token_rewards:
        if not last < found.token < count:
            place = f"token {found.token} after {last}, of {count} tokens"
            raise Invalid(f"token_rewards: {place}: name each at most once, in rising order")
        if not usable_reward(found.reward):
            what = f"{found.reward} for token {found.token}"
            raise Invalid(f"token_rewards: {what}: at most {MAX_REWARD:g} in magnitude")
        last = found.token


def _check_columns(columns: Mapping[str, bytes], tokens: int) -> None:
    for name, column in columns.items():
        if len(column) != 4 * tokens:
            raise Invalid(f"column {name[:64]} of {len(column) / 4:g}, tokens {tokens}")
        if not np.isfinite(np.frombuffer(column, "<f4")).all():
            raise Invalid(f"column {name[:64]} has numbers that are not finite")


def _loss_mask(buffer: bytes, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    if len(buffer) != tokens:
        raise Invalid(f"loss_mask of {len(buffer)}, tokens {tokens}")
    values = np.frombuffer(buffer, dtype=np.uint8)
    if values.max() > 1:
        raise Invalid("loss_mask has values other than 0 and 1")
    return values.astype(np.bool_)
