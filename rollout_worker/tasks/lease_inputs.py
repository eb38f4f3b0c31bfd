"""A lease's row, sampling parameters and scoring job; the return of a lease without a group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.schema import Config, RolloutConfig
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import SamplingParams
from rollout_worker.failures import AttemptFailed
from rollout_worker.rewards.score import Job


def row_of(lease: rollout_pb2.Lease) -> dict[str, Any]:
    """Raises AttemptFailed."""
    try:
        row = json.loads(lease.row_json)
    except json.JSONDecodeError as error:
        raise AttemptFailed("malformed_row", str(error)) from error
    if not isinstance(row, dict):
        raise AttemptFailed("malformed_row", "the row is not a JSON object")
    return row


def is_evaluation(lease: rollout_pb2.Lease) -> bool:
    return lease.kind == rollout_pb2.TASK_KIND_EVAL


def answer_of(row: Mapping[str, Any], config: Config) -> Any:
    field = config.data.answer_field
    return row.get(field) if field else None


def sampling_params(
    rollout: RolloutConfig, *, max_tokens: int, seed: int, greedy: bool
) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        seed=seed,
        greedy=greedy,
    )


def scoring_job(
    lease: rollout_pb2.Lease,
    row: Mapping[str, Any],
    config: Config,
    prompt: str,
    completions: Sequence[str],
    **each: list[Any],
) -> Job:
    """``each``: further arguments of reward functions, with a value for each completion."""
    return Job(
        prompt=prompt,
        completions=list(completions),
        answer=answer_of(row, config),
        row=row,
        shared={
            "task_id": lease.task.task_id,
            "attempt": lease.task.attempt,
            "evaluation": is_evaluation(lease),
        },
        each=each,
    )


def returned(
    lease: rollout_pb2.Lease, kind: rollout_pb2.ReturnKind, reason: str, detail: str = ""
) -> rollout_pb2.ReturnedTask:
    return rollout_pb2.ReturnedTask(task=lease.task, kind=kind, reason=reason, detail=detail[:1000])
