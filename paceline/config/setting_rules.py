"""Rules of change: for every setting, whether a run may change it, when, and what to do otherwise.

- LIVE: while the run runs (``paceline set``) and when it is continued. The value travels with the plan of a
  step or the lease of a task, so every process uses the same one, and a replay uses it again.
- START: when the run is continued. Each process reads it at its start.
- FIXED: never. The reason says what rests on it; a new run can begin with the weights of a checkpoint.

A new field of the schema must be entered here; a test finds one that is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from paceline.config.schema import Config

JsonValue = Any


class Rule(StrEnum):
    LIVE = "live"
    START = "start"
    FIXED = "fixed"


NEW_RUN = "Start a new run with the weights of a checkpoint: paceline up CONFIG --from CHECKPOINT --set {}=..."

_LIVE = {
    "train": "lr schedule warmup_steps min_lr_ratio steps max_staleness late_groups max_token_age "
    "checkpoint_every keep_checkpoints eval_every eval_limit early_stop_evals eval_drop",
    "rollout": "max_tokens top_p top_k max_turns environment_timeout_s",
    "reward": "timeout_s",
}
_START = {
    "model": "gradient_checkpointing device",
    "data": "open_timeout_s",
    "train": "tokens_per_microbatch",
    "reward": "processes",
    "rollout": "engine max_sequences dtype on_update tensor_parallel verify verify_every partial_every_tokens "
    "partial_store_mb openai openai_port openai_sampling vllm",
    "fleet": "controllers policy policy_min policy_max policy_ranks rollout rollout_min rollout_max "
    "rollout_spares provider autoscale autoscale_steps autoscale_high autoscale_patience policy_threads "
    "rollout_threads heartbeat_s lease_ttl_s suspect_grace_s drain_s finish_s stop_s wedged_after_s restart "
    "max_restarts",
    "kubernetes": "policy rollout namespace api_url token_file ca_file",
    "ray": "address policy_gpus rollout_gpus",
    "redis": "appendfsync maxmemory_mb",
    "controller": "host port leader_lease_s snapshot_every max_message_mb",
    "rest": "enabled host port",
    "archive": "enabled step_mb max_mb",
    "alerts": "webhook_file command on stall_s reward_drop disk_free_gb",
    "metrics": "sinks project wandb_entity wandb_mode mlflow_uri",
    "telemetry": "otlp_endpoint share",
    "auth": "token_file tls_cert tls_key tls_ca",
}
_OBJECTIVE = "steps that a rollback repeats must optimise what they optimised before"
_DATA = "the ledger counts rows of this data set"
_MODEL = "checkpoints hold this model and its optimizer state"
_FIXED = {
    "run.name": "the journal is stored under it",
    "run.seed": "it decides the order of the data and the seeds of tasks that are under way",
    "model.path": _MODEL,
    "model.initial_checkpoint": "the run has begun with it",
    "model.tokenizer": "groups in flight are token ids of this tokenizer",
    "model.dtype": _MODEL,
    "model.trust_remote_code": "the model's code belongs to the run",
    **dict.fromkeys(
        (
            *("data.path", "data.name", "data.split", "data.prompt_field", "data.answer_field"),
            *("data.chat", "data.system_prompt", "data.shuffle", "data.max_prompt_tokens"),
            *("data.eval_path", "data.eval_split"),
        ),
        _DATA,
    ),
    "reward.functions": "groups in flight were scored with them",
    **dict.fromkeys(
        (
            *("train.algorithm", "train.aggregation", "train.advantage_norm", "train.clip_low"),
            *(
                "train.dual_clip",
                "train.clip_high",
                "train.proximal",
                "train.tis_cap",
                "train.mask_ratio_token",
            ),
            *("train.mask_ratio_sequence", "train.kl_coef", "train.kl_estimator"),
            *("train.reference_path", "train.filter_uninformative", "train.skip_zero_advantage"),
            *("train.weight_decay", "train.betas", "train.eps", "train.max_grad_norm"),
        ),
        _OBJECTIVE,
    ),
    "train.max_nonfinite_steps": "the ledger counts steps without a finite gradient by it",
    "train.groups_per_step": "steps that a rollback repeats have this many groups",
    "rollout.group_size": "groups in flight have this many completions",
    "rollout.temperature": "the trainer computes log-probabilities with it, and groups in flight were "
    "sampled at it",
    "rollout.stop": "engines are built for it, and groups in flight were cut at it",
    "rollout.max_context": "engines and the controller are built for this length",
    "rollout.environment": "groups in flight come from it",
    "fleet.max_attempts": "failed attempts of tasks under way are counted by it",
    "redis.url": "the journal is stored there",
    "controller.payload_dir": "the payloads of the run are stored there",
}

RULES: dict[str, Rule] = {
    **{f"{s}.{name}": Rule.LIVE for s, names in _LIVE.items() for name in names.split()},
    **{f"{s}.{name}": Rule.START for s, names in _START.items() for name in names.split()},
    **dict.fromkeys(_FIXED, Rule.FIXED),
}


def refusal(name: str) -> str:
    """Why ``paceline set`` does not change this setting, and what does; empty if it is LIVE."""
    match RULES.get(name, Rule.FIXED):
        case Rule.LIVE:
            return ""
        case Rule.START if name in ("fleet.policy", "fleet.rollout"):
            role = name.partition(".")[2]
            return f"{name} is the number at the start. Use paceline scale {role}=COUNT"
        case Rule.START:
            return (
                f"{name} is read when a process starts. Interrupt paceline up, and continue the run with "
                f"--set {name}=..."
            )
    return f"{name} is fixed for the run: {_FIXED[name]}. {NEW_RUN.format(name)}"


def values_of(config: Config, rules: Iterable[Rule]) -> dict[str, JsonValue]:
    """The settings under ``rules`` by dotted name, as JSON values."""
    wanted = set(rules)
    dumped = config.model_dump(mode="json")
    return {
        f"{section}.{name}": value
        for section, fields in dumped.items()
        for name, value in fields.items()
        if RULES.get(f"{section}.{name}", Rule.FIXED) in wanted
    }


def with_settings(config: Config, settings: Mapping[str, JsonValue]) -> Config:
    """``config`` with ``settings``; what they touch is validated. Raises pydantic's ValidationError."""
    known = config.model_dump(mode="json")
    sections: dict[str, Any] = {name: getattr(config, name) for name in known}
    for dotted, value in settings.items():
        section, _, name = dotted.partition(".")
        if name in known.get(section, ()) and known[section][name] != value:
            known[section][name] = value
            sections[section] = known[section]
    return Config.model_validate(sections)


def problem_of_change(built: Config, before: Config, now: Config) -> str:
    """Why a run cannot go from ``before`` to ``now`` while it runs; empty if it can.

    ``built``: the config that its processes were started with.
    """
    most, wanted = built.rollout.max_tokens, now.rollout.max_tokens
    if wanted > most:
        return (
            f"rollout.max_tokens = {wanted}: engines were built for at most {most}. "
            + NEW_RUN.format("rollout.max_tokens")
        )
    return problem_of_divisor(before, now)


def problem_of_divisor(before: Config, now: Config) -> str:
    """Why the loss of a run cannot go on from ``before`` to ``now``; empty if it can."""
    if now.train.aggregation != "dr_grpo" or now.longest_completion == before.longest_completion:
        return ""
    return (
        f"rollout.max_tokens = {now.rollout.max_tokens}: with train.aggregation = dr_grpo it is the divisor of "
        f"the loss, and the run has {before.rollout.max_tokens}. "
        + NEW_RUN.format("rollout.max_tokens")
    )


def shown(value: JsonValue) -> str:
    """A value as a person would write it."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
