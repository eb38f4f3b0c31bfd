"""Reading of groups: payloads from the store, compared with what the controller accepted.

A payload that the store does not have is lost; a store that does not answer only delays. What has
arrived is not asked for again.

The rollout services check a group in full before it is accepted. Here its digest says that the bytes
are still those; its tokens have to be in the vocabulary, because one outside it ends a CUDA process,
and its numbers finite, because one that is not would make the whole step void.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from paceline.groups.group_check import check_group
from paceline.groups.invalid import Invalid
from paceline.groups.limits import GroupLimits
from paceline.groups.payload import decode as decode_payload
from paceline.groups.payload import meta_digest, payload_digest
from paceline.ids import ANY, TaskId
from paceline.payloads.check_store import open_or_refuse
from paceline.payloads.store import Payloads, PayloadStore, StoreUnavailable
from paceline.process.structured_log import event
from paceline.process.threads import BackgroundLoop
from paceline.v1 import policy_pb2, rollout_pb2
from policy_worker.objectives.batch import BadGroup, GroupKey, Ints, check_vocabulary, decode


@dataclass(frozen=True, slots=True)
class AcceptedGroup:
    """A payload that disagrees with it is invalid. Numbers and digests are 0 and empty if the plan
    has none."""

    key: GroupKey
    tokens: int = 0
    """To train on, over all sequences."""
    sequences: int = 0
    prompt_tokens: int = 0
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, those that are not trained included. Empty: known only to who reads
    the payload."""
    digest: str = ""
    """Of the payload."""
    facts: str = ""
    """Digest of all facts."""

    @classmethod
    def of(cls, key: GroupKey, planned: policy_pb2.PlannedGroup) -> AcceptedGroup:
        return cls(
            key,
            planned.tokens,
            planned.sequences,
            planned.prompt_tokens,
            tuple(planned.lengths),
            planned.digest,
            planned.meta_digest,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AcceptedGroup:
        """From asdict() that has gone through JSON."""
        task_id, attempt = value["key"]
        return cls(**{**value, "key": (task_id, attempt), "lengths": tuple(value["lengths"])})


@dataclass(frozen=True, slots=True)
class Outline:
    """Lengths of groups: what rows are planned by. G groups, S sequences."""

    prompt_length: Ints
    """[G]"""
    sequences: Ints
    """[G]"""
    length: Ints
    """[S], completion tokens."""

    @property
    def group_of(self) -> Ints:
        """[S]"""
        return np.repeat(np.arange(len(self.sequences)), self.sequences)

    @classmethod
    def of(cls, groups: Sequence[AcceptedGroup]) -> Outline | None:
        """None if the lengths of a group are not known."""
        if not all(group.lengths for group in groups):
            return None
        return cls(
            prompt_length=np.array([g.prompt_tokens for g in groups], dtype=np.int64),
            sequences=np.array([len(g.lengths) for g in groups], dtype=np.int64),
            length=np.array([n for g in groups for n in g.lengths], dtype=np.int64),
        )


LISTED = 8
"""Groups whose contradiction is in the message of one error."""


def read_groups(
    payloads: Payloads, accepted: Sequence[AcceptedGroup], vocabulary: int
) -> list[rollout_pb2.Group]:
    """The groups in ``payloads``, which were fetched for ``accepted``, in this order.
    ``vocabulary``: rows of the embedding.

    Raises BadGroup with all groups whose payload is lost, or else with all whose payload is
    invalid.
    """
    pairs = list(zip(accepted, payloads, strict=True))
    if lost := [group.key for group, payload in pairs if payload is None]:
        raise BadGroup("the payload store does not have the payload", lost, "payload_lost")
    groups = []
    wrong = {}
    for said, payload in pairs:
        group = _read(payload or b"", said)
        if isinstance(group, str):
            wrong[said.key] = f"the payload of {said.key[0]} {group}"
        elif why := contradiction(group, said, vocabulary):
            wrong[said.key] = why
        else:
            groups.append(group)
    if wrong:
        raise BadGroup("; ".join(list(wrong.values())[:LISTED]), list(wrong))
    return groups


def _read(payload: bytes, accepted: AcceptedGroup) -> rollout_pb2.Group | str:
    """The group, or what is wrong with its bytes."""
    if accepted.digest and payload_digest(payload) != accepted.digest:
        return f"is not what was submitted: {len(payload)} bytes with another digest"
    try:
        return decode_payload(payload)
    except DecodeError:
        return f"cannot be read: {len(payload)} bytes"


def _other_facts(group: rollout_pb2.Group, accepted: AcceptedGroup) -> str:
    """Why the facts that were accepted are not those of the group; empty if they are."""
    count = len(group.completions)
    try:
        facts = check_group(group, GroupLimits(count, ANY, eval_samples=count), ANY)
    except Invalid as error:
        return str(error)
    facts.digest = accepted.digest
    return "" if meta_digest(facts) == accepted.facts else "its facts are not those submitted"


def contradiction(group: rollout_pb2.Group, accepted: AcceptedGroup, vocabulary: int) -> str:
    """Why the payload cannot be trained; empty if it can."""
    key = accepted.key
    if (group.task.task_id, group.task.attempt) != key:
        return f"the payload of {key[0]} is one of {group.task.task_id}/{group.task.attempt}"
    try:
        batch = decode([group])
        check_vocabulary(batch, [group], vocabulary)
    except BadGroup as error:
        return str(error)
    numbers = batch.behaviour, batch.reward, batch.token_reward
    if not all(np.isfinite(found).all() for found in numbers):
        return f"group {key[0]} has log-probs or rewards that are not finite"
    if not all(np.isfinite(column).all() for column in batch.scored.values()):
        return f"group {key[0]} has log-probs of a scorer that are not finite"
    found = (len(batch.length), int(batch.trained.sum()))
    if accepted.sequences and found != (accepted.sequences, accepted.tokens):
        return (
            f"group {key[0]} has {found[0]} sequences with {found[1]} tokens to train on, accepted "
            f"were {accepted.sequences} with {accepted.tokens}"
        )
    # Rows were planned by them.
    lengths = int(batch.prompt_length[0]), tuple(batch.length.tolist())
    if accepted.lengths and lengths != (accepted.prompt_tokens, accepted.lengths):
        return f"group {key[0]} has sequences of other lengths than were accepted"
    if accepted.facts and (why := _other_facts(group, accepted)):
        return f"group {key[0]}: {why}"
    return ""


log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
LOOK_S = 0.05
"""Time after which a blocked reader asks again whether it is to give up."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """Where the payloads of a run are: arguments of open_payloads()."""

    urls: Sequence[str]
    run_id: str
    redis_url: str


class PayloadReader:
    """For the thread of a rank that has no session with the controller."""

    def __init__(self, place: StorePlace) -> None:
        """Raises BadInput if the store cannot be opened on this host."""
        self._store = open_or_refuse(place.urls, place.run_id, place.redis_url)
        self._background = BackgroundLoop("payloads")

    def fetch(self, keys: Sequence[tuple[str, int]], over: Callable[[], bool]) -> Payloads | None:
        """The payload of each of ``keys``, in their order, and None for one that is lost. None
        instead of a list if ``over()`` turned true first."""
        reading = self._background.submit(read_payloads(self._store, keys))
        while not wait([reading], LOOK_S).done:
            if over():
                reading.cancel()
                return None
        return reading.result()

    def close(self) -> None:
        self._background.run(self._store.close())
        self._background.close()


async def read_payloads(store: PayloadStore, keys: Sequence[tuple[str, int]]) -> Payloads:
    """One payload for each of ``keys`` (task id, attempt), in their order; None for one that is
    lost. Cancel it to give up."""
    refs = [(TaskId(task_id), attempt) for task_id, attempt in keys]
    found: Payloads = []
    pause_s = FIRST_RETRY_S
    while len(found) < len(refs):
        try:
            async for payload in store.stream(refs[len(found) :]):
                found.append(payload)
                pause_s = FIRST_RETRY_S
        except StoreUnavailable as error:
            event(log, "payloads delayed", logging.WARNING, have=len(found), why=str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)
    return found
