"""Sections of the configuration about services: Redis, controllers, REST, exports and access."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from paceline.config.fields import Fixed, LocalPath, Positive, Seconds, Section


class RedisConfig(Section):
    url: Annotated[str | None, Fixed("the journal is stored there")] = None
    """Address of an existing server, redis:// or rediss://. If none, Paceline starts one in the
    run directory."""
    host: str = "127.0.0.1"
    """Address on which the server that Paceline starts listens, beside loopback. Workers on other
    machines need one that they reach, such as 0.0.0.0; they log in with a password, and can command
    nothing."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the server that Paceline starts. 0 chooses a free one, and keeps it."""
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


REDIS_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")


class PayloadsConfig(Section):
    change = Fixed("the payloads of the run are stored there")

    url: str | list[str] | None = None
    """Store of the tokens of groups. If none, the Redis of the journal. Otherwise one or several
    URLs of other servers, redis:// or rediss://, over which they are spread, or one of a directory,
    file:///PATH, or of an object store that fsspec opens, such as s3://BUCKET/PREFIX.
    Every rollout worker, policy rank and controller must reach it.
    """

    @property
    def urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else self.url or []

    @model_validator(mode="after")
    def _known(self) -> PayloadsConfig:
        if self.url == []:
            raise ValueError("payloads.url is an empty list: name a store, or remove the setting")
        for url in self.urls:
            scheme, separator, rest = url.partition(":")
            if not separator or (scheme not in (*REDIS_SCHEMES, "file") and rest[:2] != "//"):
                raise ValueError(
                    f"payloads.url: {url!r} names no store: use redis://HOST:PORT/0, file:///PATH "
                    "or s3://BUCKET/PREFIX"
                )
            if scheme == "file" and (not rest.startswith("/") or rest.strip("/") == ""):
                raise ValueError(
                    "payloads.url: a directory is named by its absolute path, file:///PATH"
                )
            if scheme not in REDIS_SCHEMES and len(self.urls) > 1:
                raise ValueError(
                    "payloads.url: several stores are possible with Redis alone: name one"
                )
        return self


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
    tensorboard_dir: LocalPath | None = None
    """Directory for TensorBoard's event files of many runs, such as the one that a platform shows:
    each run has `<run.name>-<8 digits>` there. Default: `<run_dir>/tensorboard`."""
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
    read_mb_s: Annotated[float, Field(gt=0)] = 1.0
    """Payloads that the archive reads a second, in MiB, on average and about. Of steps that
    together have more it keeps the prompts and completions of a random part. Reading takes the
    leader longer than serving: a leader that commits steps as fast as it can would have a third of
    its rate if all were read.
    """


AlertKind = Literal[
    "fault", "stall", "nan", "reward_collapse", "held_out", "reward_hacking", "disk", "end"
]


class AlertsConfig(Section):
    webhook_file: LocalPath | None = None
    """File that contains the URL of a webhook. Each alert is posted to it as a JSON object with
    text, run, kind, id, step and t. The URL is in a file because it often contains a key."""
    command: list[str] = Field(default_factory=list)
    """Command, as a list of its arguments, that is run for each alert with the JSON object on its
    standard input. It runs on the machine of the leading controller."""
    on: list[AlertKind] = Field(default_factory=lambda: list(get_args(AlertKind)))
    """Kinds of alerts that are sent. Of each kind but end at most one is sent in five minutes; the
    next one says how many were held back."""
    stall_s: Seconds = 1800.0
    """A run without a committed step for this many seconds has stalled."""
    reward_drop: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """The reward has collapsed if its mean over ten steps is this fraction below the best such
    mean. 0 disables the alert."""
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
