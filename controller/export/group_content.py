"""Content of a group for people: the ledger's facts, and the completions in its payload."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from controller.ledger.specs import GroupMeta
from controller.ledger.state.state import State
from controller.ledger.state.tasks import Task
from controller.ledger.views.group_views import place_of, staleness_of
from paceline.ids import Step
from paceline.v1 import rollout_pb2

FillTexts = Callable[[rollout_pb2.Group], None]  # decodes the texts that a payload lacks; blocks
MOST_TOKENS = 8192  # longest list of tokens and log-probs of one completion
FACTS = (
    *("sequences", "tokens", "reward_mean", "reward_std", "reward_max"),
    *("min_version", "max_version"),
)
"""Fields that the ledger's facts and a reply have in common."""
FINISH = {rollout_pb2.FINISH_REASON_STOP: "stop", rollout_pb2.FINISH_REASON_LENGTH: "length"}


def facts_of(state: State, task: Task, facts: GroupMeta, step: Step) -> dict[str, Any]:
    """The fields of a GroupSummary. ``step``: the one that trains it; 0: not known yet."""
    epoch, row = place_of(state, task.task_id)
    return {
        **{name: getattr(facts, name) for name in FACTS},
        "group_id": task.task_id,
        "attempt": facts.attempt,
        "state": str(task.state),
        "owner": task.owner,
        "staleness": staleness_of(state, task, step),
        "step": step,
        "epoch": epoch,
        "dataset_row": row,
    }


def content_of(payload: bytes, fill_texts: FillTexts, *, tokens: bool = False) -> dict[str, Any]:
    """Prompt and completions as JSON values, and the times that they took. ``tokens``: with tokens
    and log-probs, which take a hundred times as long. Raises DecodeError."""
    message = rollout_pb2.Group.FromString(payload)
    fill_texts(message)
    completions = _completions(message)
    if tokens:
        for completion, sent in zip(completions, message.completions, strict=True):
            completion |= _tokens(sent)
    return {
        "prompt": message.prompt_text,
        "completions": completions,
        "generate_s": message.generate_s,
        "reward_s": message.reward_s,
    }


def _completions(message: rollout_pb2.Group) -> list[dict[str, Any]]:
    rewards = [c.reward for c in message.completions]
    mean = sum(rewards) / max(1, len(rewards))
    spread = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards)))
    return [
        {
            "text": completion.text,
            "token_count": len(completion.tokens) // 4,
            "versions": [[span.version, span.length] for span in completion.versions],
            "finish_reason": FINISH.get(completion.finish_reason, "unknown"),
            "reward": completion.reward,
            "reward_components": dict(completion.reward_components),
            "relative_reward": (completion.reward - mean) / spread if spread > 0 else 0.0,
        }
        for completion in message.completions
    ]


def _tokens(completion: rollout_pb2.Completion) -> dict[str, list[Any]]:
    tokens = np.frombuffer(completion.tokens, "<i4")[:MOST_TOKENS]
    logprobs = np.frombuffer(completion.logprobs, "<f4")[:MOST_TOKENS]
    return {"tokens": tokens.tolist(), "logprobs": [round(x, 5) for x in logprobs.tolist()]}
