"""Upload of finished groups: their check, their payload to the store, and the facts to submit.

A group that is malformed is found here, before anybody else has anything of it. The payload is
stored before the facts leave: whoever reads of an accepted group finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.config.schema import Config
from paceline.groups.group_check import check_group
from paceline.groups.invalid import Invalid
from paceline.groups.limits import GroupLimits
from paceline.groups.payload import encode, payload_digest
from paceline.ids import ANY, TaskId
from paceline.payloads.store import PayloadStore, Ref
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.leases import returned


@dataclass(frozen=True, slots=True)
class Encoded:
    """One group, ready to be stored and submitted."""

    facts: rollout_pb2.GroupMeta
    payload: bytes
    """Empty for an evaluation, of which nothing is stored."""


@dataclass(frozen=True, slots=True)
class GroupUpload:
    limits: GroupLimits
    store: PayloadStore
    texts: bool = True
    """False: the controller decodes tokens for people, and payloads are stored without texts."""

    @classmethod
    def of(cls, config: Config, store: PayloadStore, *, texts: bool = True) -> GroupUpload:
        return cls(replace(GroupLimits.of(config), max_sequence_tokens=ANY), store, texts)

    async def encode(
        self, groups: Sequence[rollout_pb2.Group]
    ) -> list[Encoded | rollout_pb2.ReturnedTask]:
        """Each group encoded, or the return of its task if it cannot be submitted."""
        # In a thread: large groups take some time, and the session must go on.
        return await asyncio.to_thread(lambda: [self._encode(group) for group in groups])

    async def put(self, groups: Sequence[Encoded]) -> None:
        """Stores the payloads. Raises StoreUnavailable; it may be repeated."""
        await self.store.put({_ref(g.facts.task): g.payload for g in groups if g.payload})

    def _encode(self, group: rollout_pb2.Group) -> Encoded | rollout_pb2.ReturnedTask:
        try:
            facts = check_group(group, self.limits, ANY)
        except Invalid as error:
            return returned(group.task, "invalid_group", str(error))
        if group.kind == rollout_pb2.TASK_KIND_EVAL:
            return Encoded(facts, b"")
        if not self.texts:
            group = _without_texts(group)
        payload = encode(group)
        if len(payload) > self.store.largest:
            detail = f"{len(payload)} bytes, the payload store takes {self.store.largest}"
            return returned(group.task, "group_too_large", detail)
        facts.digest = payload_digest(payload)
        return Encoded(facts, payload)


def _without_texts(group: rollout_pb2.Group) -> rollout_pb2.Group:
    """They follow from the tokens, and would be a third of the payload."""
    bare = rollout_pb2.Group()
    bare.CopyFrom(group)
    bare.ClearField("prompt_text")
    for completion in bare.completions:
        completion.ClearField("text")
    return bare


def _ref(task: common_pb2.TaskRef) -> Ref:
    return TaskId(task.task_id), task.attempt
