"""Reading of groups: their payloads become columns, compared with what the controller accepted.

The rollout services check a group in full before it is accepted. Here its digest says that the
bytes are still those; its tokens have to be in the vocabulary, because one outside it ends a CUDA
process, and its numbers finite, because one that is not would make the whole step void.

Everything after this file works on whole arrays. The only Python loop over completions is the one
that collects their bytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from paceline.payloads.group_payload import decode as decode_payload
from paceline.payloads.group_payload import payload_digest
from paceline.payloads.routes import UNKNOWN, BadRoutes, Routes, routes_of
from paceline.payloads.sample_paths import NOTHING, PROMPT, BadPaths, paths_of
from paceline.payloads.store import Payloads
from paceline.v1 import policy_pb2, rollout_pb2
from policy_worker.objectives.batch import (
    BadGroup,
    GroupKey,
    GroupLengths,
    Ints,
    TokenBatch,
    key_of,
)

LISTED = 8
"""Groups that the message of one error names."""


class ModelLimits(NamedTuple):
    """Ids that every model of a step knows."""

    vocabulary: int
    routes_width: int = 0
    """Experts that a token goes to, over all layers."""
    experts: int = 0
    """Experts of a layer."""


@dataclass(frozen=True, slots=True)
class AcceptedGroup:
    """The plan's entry for a group. Numbers and digests are 0 and empty if it has none."""

    key: GroupKey
    tokens: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, trained or not. Empty: known only from the payload."""
    digest: str = ""
    branches: tuple[int, ...] = ()
    """Sequences of each sample. Empty: one each."""
    prefixes: tuple[int, ...] = ()
    """Tokens of each path before its own. Empty: the prompt's."""

    @classmethod
    def of(cls, key: GroupKey, planned: policy_pb2.PlannedGroup) -> "AcceptedGroup":
        counts = planned.tokens, planned.sequences, planned.prompt_tokens
        paths = tuple(planned.branches), tuple(planned.prefixes)
        return cls(key, *counts, tuple(planned.lengths), planned.digest, *paths)


def planned_lengths(groups: Sequence[AcceptedGroup]) -> GroupLengths | None:
    """None if the lengths of a group are not known."""
    if not all(group.lengths for group in groups):
        return None
    return GroupLengths(
        prompt_length=np.array([g.prompt_tokens for g in groups], dtype=np.int64),
        sequences=np.array([len(g.lengths) for g in groups], dtype=np.int64),
        length=np.array([n for g in groups for n in g.lengths], dtype=np.int64),
        prefix=np.array(
            [n for g in groups for n in g.prefixes or (g.prompt_tokens,) * len(g.lengths)],
            dtype=np.int64,
        ),
    )


def read_groups(payloads: Payloads, accepted: Sequence[AcceptedGroup]) -> list[rollout_pb2.Group]:
    """The groups in ``payloads``, which were fetched for ``accepted``, in this order. Raises
    BadGroup with all groups whose payload is lost, or else with all whose bytes are not those that
    were submitted."""
    pairs = list(zip(accepted, payloads, strict=True))
    if lost := [group.key for group, payload in pairs if payload is None]:
        raise BadGroup("the payload store does not have the payload", lost, "payload_lost")
    groups, wrong = [], {}
    for group, payload in pairs:
        found = _parsed(payload or b"", group)
        if isinstance(found, str):
            wrong[group.key] = f"the payload of {group.key[0]} {found}"
        else:
            groups.append(found)
    if wrong:
        raise BadGroup("; ".join(list(wrong.values())[:LISTED]), list(wrong))
    return groups


def _parsed(payload: bytes, accepted: AcceptedGroup) -> rollout_pb2.Group | str:
    if accepted.digest and payload_digest(payload) != accepted.digest:
        return f"is not what was submitted: {len(payload)} bytes with another digest"
    try:
        group = decode_payload(payload)
    except DecodeError:
        return f"cannot be read: {len(payload)} bytes"
    return group if key_of(group) == accepted.key else f"is of {group.task.task_id}"


def read_batch(
    groups: Sequence[rollout_pb2.Group], accepted: Sequence[AcceptedGroup], limits: ModelLimits
) -> TokenBatch:
    """Columns of ``groups``. Raises BadGroup with those that contradict themselves, that no model
    of ``limits`` can train, or that have other counts than were ``accepted``: the step's
    totals are sums of these."""
    batch = decode(groups)
    check_values(batch, groups, limits)
    ends = np.cumsum(batch.sequences)
    tokens = np.bincount(np.repeat(batch.group_of, batch.length), batch.trained, len(groups))
    of_sample = np.bincount(batch.sample_of)
    sample_ends = np.cumsum(batch.samples)
    wrong = []
    for g, (group, end) in enumerate(zip(accepted, ends, strict=True)):
        here = slice(end - batch.sequences[g], end)
        prompt, lengths = int(batch.prompt_length[g]), tuple(batch.length[here].tolist())
        counts = (len(lengths), int(tokens[g])) == (group.sequences, group.tokens)
        sizes = (prompt, lengths) == (group.prompt_tokens, group.lengths)
        branches = of_sample[sample_ends[g] - batch.samples[g] : sample_ends[g]].tolist()
        paths = tuple(branches), tuple(batch.prefix[here].tolist())
        one_each = (1,) * len(lengths), (prompt,) * len(lengths)
        sizes &= paths == ((group.branches, group.prefixes) if group.branches else one_each)
        if (group.sequences and not counts) or (group.lengths and not sizes):
            wrong.append(g)
    refuse_groups(groups, np.array(wrong, np.int64), "it has other counts than were accepted")
    return batch


def decode(groups: Sequence[rollout_pb2.Group]) -> TokenBatch:
    """Columns of ``groups``, in their order. Raises BadGroup with those that contradict themselves.

    The digest only says that a payload is what its worker sent. One column of another length would
    shift the numbers of all sequences after it.
    """
    completions = [completion for group in groups for completion in group.completions]
    tokens = [c.tokens for c in completions]
    masks = [c.loss_mask or b"\x01" * (len(c.tokens) // 4) for c in completions]
    spans = [span for c in completions for span in c.versions]
    rewards = [reward for c in completions for reward in c.token_rewards]
    scorers = set().union(*(c.columns for c in completions))
    sequences = _ints(len(g.completions) for g in groups)
    size = _ints(map(len, tokens))
    length = size // 4
    wrong = (size == 0) | (size % 4 > 0) | (_ints(map(len, masks)) * 4 != size)
    wrong |= _ints(len(c.logprobs) for c in completions) != size
    wrong |= _ints(sum(s.length for s in c.versions) for c in completions) != length
    wrong |= np.repeat(_ints(len(g.prompt_tokens) % 4 for g in groups) > 0, sequences)
    for name in scorers:
        wrong |= _ints(len(c.columns.get(name, b"")) for c in completions) != size
    if rewards:
        wrong |= np.array(
            [_misplaced(c.token_rewards, n) for c, n in zip(completions, length, strict=True)]
        )
    refuse_groups(
        groups,
        np.unique(np.repeat(np.arange(len(groups)), sequences)[wrong]),
        "its tokens, log-probs, masks, versions, numbers of scorers and token rewards do not fit "
        "one another",
    )
    starts = np.repeat(np.cumsum(length) - length, _ints(len(c.token_rewards) for c in completions))
    routes, prompt_routes = _routes(groups)
    parent, prefix, branches = _paths(groups, sequences)
    sample_of = np.repeat(np.arange(len(branches)), branches)
    reward = np.array([c.reward for c in completions], dtype=np.float64)
    trained = _joined(masks, np.uint8).astype(np.float32)
    guessed = (parent < 0) & ((trained[np.cumsum(length) - length] > 0) | (length == 1))
    refuse_groups(
        groups,
        np.unique(np.repeat(np.arange(len(groups)), sequences)[guessed]),
        "the first token of a path is trained, and nothing predicts it, or is the only one",
    )
    return TokenBatch(
        routes=routes,
        prompt_routes=prompt_routes,
        prompt_tokens=_joined([g.prompt_tokens for g in groups], "<i4").astype(np.int64),
        prompt_length=_ints(len(g.prompt_tokens) // 4 for g in groups),
        sequences=sequences,
        tokens=_joined(tokens, "<i4").astype(np.int64),
        length=length,
        prefix=prefix,
        parent=parent,
        sample_of=sample_of,
        behaviour=_joined([c.logprobs for c in completions], "<f4").astype(np.float32),
        trained=trained,
        version=np.repeat(_ints(s.version for s in spans), _ints(s.length for s in spans)),
        reward=reward[np.cumsum(branches) - branches][sample_of],
        rewarded=_ints(r.token for r in rewards) + starts,
        token_reward=np.array([r.reward for r in rewards], dtype=np.float64),
        scored={
            name: _joined([c.columns[name] for c in completions], "<f4").astype(np.float32)
            for name in sorted(scorers)
        },
        truncated=np.array([c.finish_reason for c in completions])
        == rollout_pb2.FINISH_REASON_LENGTH,
    )


def _paths(groups: Sequence[rollout_pb2.Group], sequences: Ints) -> tuple[Ints, Ints, Ints]:
    """Parents [S] and prefixes [S] as in a batch, and the sequences of each sample [N]. Raises
    BadGroup."""
    parents: list[int] = []
    prefixes: list[int] = []
    branches: list[int] = []
    for number, (group, end) in enumerate(zip(groups, np.cumsum(sequences).tolist(), strict=True)):
        try:
            paths = paths_of(group)
        except BadPaths as error:
            refuse_groups(groups, np.array([number]), str(error))
        first = len(groups) + end - len(paths.parents)
        named = {PROMPT: number, NOTHING: -1}
        parents += [named[p] if p < 0 else first + p for p in paths.parents]
        prefixes += paths.prefixes
        branches += paths.branches
    return _ints(parents), _ints(prefixes), _ints(branches)


def _routes(groups: Sequence[rollout_pb2.Group]) -> tuple[Routes | None, Routes | None]:
    """Routes of the completions' tokens, and of the prompts'. Raises BadGroup."""
    width = max((group.routes_width for group in groups), default=0)
    if not width:
        return None, None
    found: list[tuple[Routes, Routes]] = []
    for number, group in enumerate(groups):
        try:
            found.append(routes_of(group, width))
        except BadRoutes as error:
            refuse_groups(groups, np.array([number]), str(error))
    prompts, completions = zip(*found, strict=True)
    return np.concatenate(completions), np.concatenate(prompts)


def _misplaced(rewards: Sequence[rollout_pb2.TokenReward], length: int) -> bool:
    """True if ``rewards`` name a token that is not there, or not in rising order."""
    places = [reward.token for reward in rewards]
    return any(a >= b for a, b in pairwise([-1, *places, length]))


def _ints(values: Iterable[int]) -> Ints:
    return np.array([*values], dtype=np.int64)


def _joined(parts: Sequence[bytes], dtype: Any) -> NDArray[Any]:
    return np.frombuffer(b"".join(parts), dtype=dtype)


def refuse_groups(groups: Sequence[rollout_pb2.Group], which: Ints, why: str) -> None:
    """Raises BadGroup with the groups ``which``, if any."""
    if keys := [key_of(groups[int(g)]) for g in which]:
        names = ", ".join(task_id for task_id, _ in keys[:LISTED])
        raise BadGroup(f"group {names}: {why}", keys)


def check_values(
    batch: TokenBatch, groups: Sequence[rollout_pb2.Group], limits: ModelLimits
) -> None:
    """Raises BadGroup with the groups that have a token id or an expert that no model has, or a
    number that is not finite."""
    vocabulary = limits.vocabulary
    group_of = batch.group_of
    of_token = np.repeat(group_of, batch.length)
    of_prompt = np.repeat(np.arange(len(groups)), batch.prompt_length)
    ids = np.concatenate([batch.tokens, batch.prompt_tokens])
    strange = (ids < 0) | (ids >= vocabulary)
    if strange.any():
        unknown = np.unique(np.concatenate([of_token, of_prompt])[strange])
        why = f"token {ids[strange][0]} is outside the vocabulary, the model knows {vocabulary}"
        refuse_groups(groups, unknown, why)
    for routes, place in ((batch.routes, of_token), (batch.prompt_routes, of_prompt)):
        if routes is None:
            continue
        if routes.shape[1] != limits.routes_width:
            why = f"tokens go to {routes.shape[1]} experts, in the model to {limits.routes_width}"
            refuse_groups(groups, np.unique(place), why)
        strange = ((routes >= limits.experts) & (routes != UNKNOWN)).any(1)
        why = f"an expert is not among the {limits.experts} of a layer"
        refuse_groups(groups, np.unique(place[strange]), why)
    numbers: list[tuple[NDArray[Any], Ints]] = [
        (batch.reward, group_of),
        (batch.token_reward, of_token[batch.rewarded]),
        *((column, of_token) for column in (batch.behaviour, *batch.scored.values())),
    ]
    broken = [place[~np.isfinite(column)] for column, place in numbers]
    refuse_groups(groups, np.unique(np.concatenate(broken)), "log-probs or rewards are not finite")
