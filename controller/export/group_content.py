"""Content of a group for people: the ledger's metadata, and the completions in its payload."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from controller.ledger.specs import GroupMeta
from controller.ledger.state.state import State
from controller.ledger.state.tasks import Task
from paceline.ids import Step, TaskId
from paceline.observe.groups import META_FIELDS, Filter, GroupSummary
from paceline.observe.samples import ArchiveReader
from paceline.payloads.store import PayloadStore
from paceline.v1 import rollout_pb2

MOST_TOKENS = 8192  # longest list of tokens and log-probs of one completion
FINISH = {rollout_pb2.FINISH_REASON_STOP: "stop", rollout_pb2.FINISH_REASON_LENGTH: "length"}


def meta_of(state: State, task: Task, meta: GroupMeta, step: Step) -> dict[str, Any]:
    """The fields of a GroupSummary. ``step``: the one that trains it; 0: not known yet."""
    epoch, row = state.run.order.place(task.ordinal)
    facts = {name: getattr(meta, name) for name in META_FIELDS}
    if meta.min_version < 0:  # recorded data is of no version
        facts |= dict.fromkeys(("min_version", "max_version"))
    return {
        **facts,
        "group_id": task.task_id,
        "attempt": meta.attempt,
        "state": str(task.state),
        "owner": task.owner or None,
        "staleness": state.versions.staleness(meta.min_version, step or state.next_step),
        "step": step or None,
        "epoch": epoch,
        "dataset_row": row,
    }


def _step_of_task(state: State) -> dict[TaskId, Step]:
    """Task id to the step that trains it, for tasks in or past a step."""
    book = state.steps
    found = {task_id: step for step, ids in book.history.items() for task_id in ids}
    found.update({task_id: step for step, ids in book.replay.items() for task_id in ids})
    if book.open is not None:
        found.update(dict.fromkeys(book.open.groups, book.open.step))
    return found


def stored_groups(state: State) -> list[GroupSummary]:
    """The groups whose samples are stored."""
    steps = _step_of_task(state)
    return [
        GroupSummary(**meta_of(state, task, task.group, steps.get(task.task_id, Step(0))))
        for task in state.tasks.records.values()
        if task.group is not None
    ]


class GroupGone(Exception):
    """The group has no samples, or none any more."""


async def stored_group(state: State, payloads: PayloadStore, group_id: str) -> dict[str, Any]:
    """The fields of a Group, with its completions. Raises GroupGone."""
    task_id = TaskId(group_id)
    task = state.tasks.records.get(task_id)
    if task is None or task.group is None:
        raise GroupGone(_reason_of_absence(state, task, group_id))
    meta = meta_of(state, task, task.group, _step_of_task(state).get(task_id, Step(0)))
    (payload,) = await payloads.get([task.ref])
    if payload is None:
        raise GroupGone(f"a checkpoint has just covered group {group_id}: its samples are gone")
    try:
        return meta | await asyncio.to_thread(content_of, payload, tokens=True)
    except DecodeError:
        problem = f"the stored payload of group {group_id} cannot be decoded"
        raise GroupGone(problem) from None


class GroupReader:
    """Groups of a run: those whose samples are stored, and those of its archive."""

    def __init__(self, run_dir: Path, payloads: PayloadStore) -> None:
        self._archive, self._payloads = ArchiveReader(run_dir), payloads

    async def matching(self, state: State, chosen: Filter) -> Sequence[GroupSummary]:
        """Groups that are not dropped; of a row, dropped ones as well."""
        stored, dropped = stored_groups(state), chosen.row is not None
        return await asyncio.to_thread(self._archive.groups, stored, dropped=dropped)

    async def with_text(self, groups: Sequence[GroupSummary], text: str) -> Sequence[GroupSummary]:
        return await asyncio.to_thread(self._archive.with_text, groups, text)

    async def whole(self, state: State, group_id: str) -> dict[str, Any]:
        """The fields of a Group. Raises GroupGone."""
        try:
            return await stored_group(state, self._payloads, group_id)
        except GroupGone:
            archived = await asyncio.to_thread(self._archive.group, group_id)
            if archived is not None and archived["completions"]:
                return archived
            raise


def _reason_of_absence(state: State, task: Task | None, group_id: str) -> str:
    if group_id in state.tasks.outcomes:
        return (
            f"group {group_id} is finished, and its samples are deleted: they are kept until a "
            "checkpoint covers their step"
        )
    if task is not None:
        return f"group {group_id} is {task.state}: it has no samples yet"
    return f"there is no group {group_id[:32]!r}, or its samples were deleted long ago"


def content_of(payload: bytes, *, tokens: bool = False) -> dict[str, Any]:
    """Prompt and completions as JSON values, and the times that they took. ``tokens``: with tokens
    and log-probs, which take a hundred times as long. Raises DecodeError."""
    message = rollout_pb2.Group.FromString(payload)
    samples = [sent for sent in message.completions if not sent.HasField("branch")]
    rewards = np.array([sent.reward for sent in samples] or [0.0])
    # The mean of equal rewards may round: they differ from it, and not from one another.
    mean, spread = float(rewards.mean()), float(rewards.std()) if np.ptp(rewards) else 0.0
    completions: list[dict[str, Any]] = []
    sample = rollout_pb2.Completion()
    for sent in message.completions:
        branch: dict[str, int] = {}
        if sent.HasField("branch"):
            branch = {"branch_of": sent.branch.of, "shared_tokens": sent.branch.prefix}
        else:
            sample = sent
        completions.append(
            {
                "text": sent.text,
                "token_count": len(sent.tokens) // 4,
                "versions": [[span.version, span.length] for span in sent.versions],
                "finish_reason": FINISH.get(sent.finish_reason, "unknown"),
                "reward": sample.reward,
                "reward_components": dict(sample.reward_components),
                "relative_reward": (sample.reward - mean) / spread if spread > 0 else 0.0,
                **branch,
            }
        )
    if tokens:
        for completion, sent in zip(completions, message.completions, strict=True):
            ids = np.frombuffer(sent.tokens, "<i4")[:MOST_TOKENS]
            logprobs = np.frombuffer(sent.logprobs, "<f4")[:MOST_TOKENS]
            completion["tokens"] = ids.tolist()
            completion["logprobs"] = [round(x, 5) for x in logprobs.tolist()]
    return {
        "prompt": message.prompt_text,
        "completions": completions,
        "generate_s": message.generate_s,
        "reward_s": message.reward_s,
    }
