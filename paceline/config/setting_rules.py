"""Rules of change: for every setting, whether a run may change it, when, and what to do otherwise.

- LIVE: while the run runs (``paceline set``) and when it is continued. The value travels with the
  plan of a step or the lease of a task, so every process uses the same one, and a replay uses it
  again.
- START: when the run is continued. Each process reads it at its start.
- FIXED: never. The reason says what rests on it; a new run can begin with the weights of a
  checkpoint.

A new field of the schema must be entered here; a test finds one that is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from paceline.config.schema import SECTIONS, Config

JsonValue = Any


class Rule(StrEnum):
    LIVE = "live"
    START = "start"
    FIXED = "fixed"


NEW_RUN = "Start a new run with the weights of a checkpoint: paceline up CONFIG --from CHECKPOINT --set {}=..."

_LIVE = {
    "train": "steps epochs max_samples max_staleness late_groups max_token_age "
    "checkpoint_every keep_checkpoints eval_every eval_limit early_stop_evals eval_drop",
    "train.optimizer": "lr schedule warmup_steps min_lr_ratio",
    "rollout": "max_tokens top_p top_k max_turns environment_timeout_s",
    "reward": "timeout_s",
}
_START = {
    "model": "gradient_checkpointing attention compile device",
    "data": "open_timeout_s",
    "train.memory": "tokens_per_microbatch gradient_sync reshard_after_forward offload_optimizer offload_frozen offload_activations offload_publishing logits_chunk_mb",
    "reward": "processes",
    "rollout": "engine engine_options max_sequences dtype on_update tensor_parallel verify verify_every weight_deltas relay_stall_s partial_every_tokens "
    "openai openai_port openai_sampling vllm",
    "fleet": "controllers policy policy_min policy_max policy_ranks rollout rollout_min rollout_max "
    "rollout_spares provider autoscale autoscale_steps autoscale_high autoscale_patience policy_threads "
    "rollout_threads scorers scorers_min scorers_max scorer_threads heartbeat_s lease_ttl_s suspect_grace_s drain_s finish_s stop_s wedged_after_s restart "
    "max_restarts",
    "kubernetes": "policy rollout scorer namespace api_url token_file ca_file",
    "ray": "address policy_gpus rollout_gpus scorer_gpus",
    "redis": "host port appendfsync maxmemory_mb",
    "controller": "host port leader_lease_s snapshot_every max_message_mb",
    "rest": "enabled host port",
    "archive": "enabled step_mb read_mb_s max_mb",
    "alerts": "webhook_file command on stall_s reward_drop disk_free_gb",
    "metrics": "sinks tensorboard_dir project wandb_entity wandb_mode mlflow_uri",
    "telemetry": "otlp_endpoint share",
    "auth": "token_file tls_cert tls_key tls_ca",
}
SCORER_START = ("url", "api_key_file", "batch_size", "timeout_s", "attempts", "dtype")
"""Settings of a scorer that a continued run may change; the others decide its numbers, and are
fixed."""
_OBJECTIVE = "steps that a rollback repeats must optimise what they optimised before"
_SCORED = "groups in flight were scored with it"
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
            *("data.eval_path", "data.eval_split", "data.messages_field", "data.completion_field"),
            *("data.chosen_field", "data.rejected_field", "data.margin_field", "data.label_field"),
            *(
                "data.sources",
                "data.curriculum",
                "data.curriculum_min",
            ),
            *(
                "data.prompt_template",
                "data.prompt_suffix",
                "data.chat_template_args",
                "data.long_prompts",
            ),
        ),
        _DATA,
    ),
    **dict.fromkeys(
        ("reward.functions", "reward.overlong_buffer", "reward.overlong_penalty"),
        "groups in flight were scored with them",
    ),
    **dict.fromkeys(
        ("evaluation.sets", "evaluation.best_metric"),
        "the ledger ranks checkpoints by these evaluations",
    ),
    **dict.fromkeys(
        (
            *(
                "train.algorithm",
                "train.loss.aggregation",
                "train.loss.advantage_norm",
                "train.loss.clip_low",
            ),
            *(
                "train.loss.dual_clip",
                "train.loss.clip_high",
                "train.loss.proximal",
                "train.loss.tis_cap",
                "train.loss.mask_ratio_token",
            ),
            *(
                "train.loss.mask_ratio_sequence",
                "train.loss.kl_coef",
                "train.loss.kl_estimator",
                "train.loss.kl_in",
            ),
            *("train.loss.advantage", "train.loss.surrogate", "train.loss.importance_level"),
            *(
                "train.loss.entropy_coef",
                "train.loss.router_aux_loss_coef",
                "train.loss.overlong_filter",
                "train.loss.covariance",
            ),
            *(
                "train.loss.covariance_share",
                "train.loss.covariance_range",
                "train.loss.covariance_kl_coef",
            ),
            *(
                "train.loss.reference",
                "train.loss.reference_path",
                "train.filter_uninformative",
                "train.loss.skip_zero_advantage",
            ),
            *(
                "train.optimizer.weight_decay",
                "train.optimizer.betas",
                "train.optimizer.eps",
                "train.optimizer.max_grad_norm",
            ),
        ),
        _OBJECTIVE,
    ),
    "train.max_nonfinite_steps": "the ledger counts steps without a finite gradient by it",
    "train.groups_per_step": "steps that a rollback repeats have this many groups",
    "rollout.source": "the ledger counts ages of sampled groups alone",
    "rollout.group_size": "groups in flight have this many completions",
    "rollout.temperature": "the trainer computes log-probabilities with it, and groups in flight were "
    "sampled at it",
    "rollout.stop": "engines are built for it, and groups in flight were cut at it",
    "rollout.relay_fanout": "the ledger decides by it who sends weights to whom",
    "rollout.max_context": "engines and the controller are built for this length",
    "rollout.environment": "groups in flight come from it",
    "fleet.max_attempts": "failed attempts of tasks under way are counted by it",
    "redis.url": "the journal is stored there",
    "payloads.url": "the payloads of the run are stored there",
}

RULES: dict[str, Rule] = {
    **{f"{s}.{name}": Rule.LIVE for s, names in _LIVE.items() for name in names.split()},
    **{f"{s}.{name}": Rule.START for s, names in _START.items() for name in names.split()},
    **dict.fromkeys(_FIXED, Rule.FIXED),
}


def refusal(name: str) -> str:
    """Why ``paceline set`` does not change this setting, and what does; empty if it is LIVE."""
    match rule_of(name):
        case Rule.LIVE:
            return ""
        case Rule.START if name in ("fleet.policy", "fleet.rollout", "fleet.scorers"):
            role = name.partition(".")[2].replace("scorers", "scorer:NAME")
            return f"{name} is the number at the start. Use paceline scale {role}=COUNT"
        case Rule.START:
            return (
                f"{name} is read when a process starts. Interrupt paceline up, and continue the run with "
                f"--set {name}=..."
            )
    why = _SCORED if name.startswith("scorers.") else _FIXED.get(name, _OBJECTIVE)
    return f"{name} is fixed for the run: {why}. {NEW_RUN.format(name)}"


def rule_of(name: str) -> Rule:
    """Of a setting by its dotted name. The settings of all scorers have the same rules."""
    section, _, rest = name.partition(".")
    if section == "scorers":
        return Rule.START if rest.partition(".")[2] in SCORER_START else Rule.FIXED
    return RULES.get(name, Rule.FIXED)


def values_of(config: Config, rules: Iterable[Rule]) -> dict[str, JsonValue]:
    """The settings under ``rules`` by dotted name, as JSON values."""
    wanted = set(rules)
    return {
        name: value
        for name, value in flat_settings(config.model_dump(mode="json"))
        if rule_of(name) in wanted
    }


def flat_settings(
    values: Mapping[str, JsonValue], path: str = ""
) -> Iterator[tuple[str, JsonValue]]:
    """Settings by dotted name, from nested sections. Those of scorers are sections as well."""
    for name, value in values.items():
        dotted = f"{path}{name}"
        if isinstance(value, Mapping) and (dotted in SECTIONS or path == "scorers."):
            yield from flat_settings(value, f"{dotted}.")
        else:
            yield dotted, value


def with_settings(config: Config, settings: Mapping[str, JsonValue]) -> Config:
    """``config`` with ``settings``; what they touch is validated. Raises pydantic's
    ValidationError."""
    known = config.model_dump(mode="json")
    sections: dict[str, Any] = {name: getattr(config, name) for name in known}
    for dotted, value in settings.items():
        section, *tables, name = dotted.split(".")
        fields = known.get(section, {})
        for table in tables:
            fields = fields.get(table, {})
        if name in fields and fields[name] != value:
            fields[name] = value
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
    if (
        now.train.loss.aggregation != "dr_grpo"
        or now.longest_completion == before.longest_completion
    ):
        return ""
    name = f"rollout.{now.length_setting}"
    return (
        f"{name} = {now.longest_completion}: with train.loss.aggregation = dr_grpo it is the divisor of the loss, and "
        f"the run has {before.longest_completion}. " + NEW_RUN.format(name)
    )


def shown(value: JsonValue) -> str:
    """A value as a person would write it."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)
