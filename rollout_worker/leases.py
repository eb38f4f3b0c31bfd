"""Leases as they are read: the row, the settings of the task, and its sampling."""

import json
from collections.abc import Mapping
from typing import Any

from paceline.config.schema import Config
from paceline.config.sections.evaluation import EvalSetConfig
from paceline.groups.limits import task_settings
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import SamplingParams
from rollout_worker.failures import AttemptFailed


def row_of(lease: rollout_pb2.Lease) -> dict[str, Any]:
    """Raises AttemptFailed."""
    try:
        row = json.loads(lease.row_json)
    except json.JSONDecodeError as error:
        raise AttemptFailed("malformed_row", str(error)) from error
    if not isinstance(row, dict):
        raise AttemptFailed("malformed_row", "the row is not a JSON object")
    return row


def in_data_fields(row: dict[str, Any], lease: rollout_pb2.Lease, config: Config) -> dict[str, Any]:
    """The lease's row with prompt and answer in the fields that ``data`` names."""
    of, data = eval_set_of(lease, config), config.data
    if of is None:
        return row
    named = {data.prompt_field: of.prompt_field, data.answer_field: of.answer_field}
    given = {to: row[name] for to, name in named.items() if to and name and name in row}
    return {**row, **given}


def is_evaluation(lease: rollout_pb2.Lease) -> bool:
    return lease.kind == rollout_pb2.TASK_KIND_EVAL


def eval_set_of(lease: rollout_pb2.Lease, config: Config) -> EvalSetConfig | None:
    """The named set of an evaluation; None for that of data.eval_path, and for training tasks."""
    return config.evaluation.sets.get(lease.eval_set) if lease.eval_set else None


def answer_of(row: Mapping[str, Any], config: Config) -> Any:
    field = config.data.answer_field
    return row.get(field) if field else None


def settings_of(lease: rollout_pb2.Lease, config: Config) -> rollout_pb2.TaskSettings:
    """Settings of the task, as its lease has them: they may change during a run."""
    return lease.settings if lease.HasField("settings") else task_settings(config)


def sampling_params(config: Config, lease: rollout_pb2.Lease) -> SamplingParams:
    settings, rollout = settings_of(lease, config), config.rollout
    of = eval_set_of(lease, config)
    return SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=(of and of.temperature) or rollout.temperature,
        top_p=(of and of.top_p) or settings.top_p,
        top_k=settings.top_k,
        stop=tuple(rollout.stop),
        seed=lease.seed,
        greedy=is_evaluation(lease) if of is None else of.is_greedy,
    )


def returned(
    task: common_pb2.TaskRef,
    reason: str,
    detail: str = "",
    kind: rollout_pb2.ReturnKind = rollout_pb2.RETURN_KIND_FAILED,
) -> rollout_pb2.ReturnedTask:
    return rollout_pb2.ReturnedTask(task=task, kind=kind, reason=reason, detail=detail[:1000])
