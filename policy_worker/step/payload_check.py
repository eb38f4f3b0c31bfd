"""Payload checks: fetched groups against the facts that the controller accepted.

The step's totals are sums of these facts. A payload with other counts would be weighted wrongly, and a
token outside the vocabulary ends a CUDA process: both are found here, and the group is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.v1 import policy_pb2, rollout_pb2
from policy_worker.step.batch import BadGroup, GroupKey, check_vocabulary, decode

LISTED = 8
"""Groups whose contradiction is in the message of one error."""


def check_payloads(
    groups: Sequence[rollout_pb2.Group],
    keys: Sequence[GroupKey],
    planned: Mapping[GroupKey, policy_pb2.PlannedGroup],
    vocabulary: int,
) -> None:
    """``groups`` were fetched for ``keys``, in this order. ``vocabulary``: rows of the embedding.

    Raises BadGroup with all groups whose payload is lost, or else with all whose payload is invalid.
    """
    pairs = list(zip(keys, groups, strict=True))
    if lost := [key for key, group in pairs if not group.completions]:
        raise BadGroup("the payload store has no readable payload", lost, "payload_lost")
    wrong = {}
    for key, group in pairs:
        if why := contradiction(group, key, planned.get(key), vocabulary):
            wrong[key] = why
    if wrong:
        raise BadGroup("; ".join(list(wrong.values())[:LISTED]), list(wrong))


def contradiction(
    group: rollout_pb2.Group,
    key: GroupKey,
    planned: policy_pb2.PlannedGroup | None,
    vocabulary: int,
) -> str:
    """Why the payload cannot be trained; empty if it can."""
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
    if planned is not None and found != (planned.sequences, planned.tokens):
        return (
            f"group {key[0]} has {found[0]} sequences with {found[1]} tokens to train on, accepted "
            f"were {planned.sequences} with {planned.tokens}"
        )
    return ""
