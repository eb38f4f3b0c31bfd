"""Payload checks: what the store returned, against the digests and facts that the controller
accepted.

The step's totals are sums of these facts. A payload with other counts would be weighted wrongly,
and a token outside the vocabulary ends a CUDA process: both are found here, and the group is named.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from paceline.groups.group_check import check_group
from paceline.groups.invalid import Invalid
from paceline.groups.limits import ANY, GroupLimits
from paceline.groups.payload import decode as decode_payload
from paceline.groups.payload import facts_digest, payload_digest
from paceline.payloads.store import Payloads
from paceline.v1 import rollout_pb2
from policy_worker.step.accepted_group import AcceptedGroup
from policy_worker.step.batch import BadGroup, check_vocabulary, decode

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
    return "" if facts_digest(facts) == accepted.facts else "its facts are not those submitted"


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
