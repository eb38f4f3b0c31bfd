"""Reading of groups: payloads from the store, compared with what the controller accepted.

A payload that the store does not have is lost; a store that does not answer only delays. What has
arrived is not asked for again.

The rollout services check a group in full before it is accepted. Here its digest says that the
bytes are still those; its tokens have to be in the vocabulary, because one outside it ends a CUDA
process, and its numbers finite, because one that is not would make the whole step void.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from paceline.ids import TaskId
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import Payloads, PayloadStore, StoreUnavailable, payload_digest
from paceline.payloads.store import decode as decode_payload
from paceline.process.structured_log import event
from paceline.process.threads import BackgroundLoop
from paceline.v1 import policy_pb2, rollout_pb2
from policy_worker.objectives.batch import (
    LISTED,
    BadGroup,
    GroupKey,
    GroupLengths,
    TokenBatch,
    check_values,
    key_of,
    refuse_groups,
)

log = logging.getLogger(__name__)


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

    @classmethod
    def of(cls, key: GroupKey, planned: policy_pb2.PlannedGroup) -> "AcceptedGroup":
        counts = planned.tokens, planned.sequences, planned.prompt_tokens
        return cls(key, *counts, tuple(planned.lengths), planned.digest)


def planned_lengths(groups: Sequence[AcceptedGroup]) -> GroupLengths | None:
    """None if the lengths of a group are not known."""
    if not all(group.lengths for group in groups):
        return None
    return GroupLengths(
        prompt_length=np.array([g.prompt_tokens for g in groups], dtype=np.int64),
        sequences=np.array([len(g.lengths) for g in groups], dtype=np.int64),
        length=np.array([n for g in groups for n in g.lengths], dtype=np.int64),
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


def check_groups(
    batch: TokenBatch,
    groups: Sequence[rollout_pb2.Group],
    accepted: Sequence[AcceptedGroup],
    vocabulary: int,
) -> None:
    """Raises BadGroup: the step's totals are sums of what was accepted."""
    check_values(batch, groups, vocabulary)
    ends = np.cumsum(batch.sequences)
    tokens = np.bincount(np.repeat(batch.group_of, batch.length), batch.trained, len(groups))
    wrong = []
    for g, (group, end) in enumerate(zip(accepted, ends, strict=True)):
        lengths = tuple(batch.length[end - batch.sequences[g] : end].tolist())
        same = (len(lengths), int(tokens[g])) == (group.sequences, group.tokens)
        rows = (int(batch.prompt_length[g]), lengths) == (group.prompt_tokens, group.lengths)
        if (group.sequences and not same) or (group.lengths and not rows):
            wrong.append(g)
    refuse_groups(groups, np.array(wrong, np.int64), "it has other counts than were accepted")


FIRST_RETRY_S = 0.1
LAST_RETRY_S = 2.0
LOOK_S = 0.05
"""Time after which a blocked reader asks again whether it is to give up."""


@dataclass(frozen=True, slots=True)
class StorePlace:
    """The place of the payloads of a run: arguments of open_payloads()."""

    urls: Sequence[str]
    run_id: str
    redis_url: str


class PayloadReader:
    """For the thread of a rank that has no session with the controller."""

    def __init__(self, place: StorePlace) -> None:
        """Raises BadInput if the store cannot be opened on this host."""
        self._store = open_payloads(place.urls, place.run_id, place.redis_url)
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
