"""Sections of the configuration about services: Redis, controllers, REST, exports and access."""

from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from paceline.config.fields import Fixed, LocalPath, Positive, Seconds, Section

REDIS_SCHEMES = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")


def check_ports(setting: str, url: str) -> None:
    """Raises ValueError if an address in the URL of a Redis has a port that is none."""
    for address in urlsplit(url).netloc.rpartition("@")[2].split(","):
        try:
            _ = urlsplit(f"//{address}").port
        except ValueError:
            raise ValueError(
                f"{setting}: a port is a number from 0 to 65535, as in redis://HOST:6379/0; in a "
                "password, / is written %2F, and @ %40"
            ) from None


class RedisConfig(Section):
    url: Annotated[str | None, Fixed("the journal is stored there")] = None
    """Existing server, redis:// or rediss://. If none, Paceline starts one in the run directory."""
    host: str = "127.0.0.1"
    """Address at which workers on other machines reach Paceline's own server, such as 0.0.0.0: over
    TLS, with a password and limited rights. On this machine it listens on a Unix socket."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port for other machines. 0 chooses a free one, and keeps it."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """everysec survives the death of any process, and a power failure may lose one second. always
    loses nothing and is slower."""
    maxmemory_mb: Positive | None = None
    """Memory limit of Paceline's own server, in MiB. Above it, it refuses writes."""

    @model_validator(mode="after")
    def _has_ports(self) -> "RedisConfig":
        check_ports("redis.url", self.url or "")
        return self


class ControllerConfig(Section):
    host: str = "127.0.0.1"
    """Address on which controllers listen. Any address but loopback needs auth.token_file."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """gRPC port of the first controller; the others use the next ones. 0: Unix sockets in the run
    directory if host is loopback, else free ports."""
    leader_lease_s: Seconds = 1.0
    """A leader that does not renew its lease for this many seconds is replaced by a standby."""
    snapshot_every: Annotated[int, Field(ge=100)] = 20000
    """Journal events between two snapshots of the ledger."""
    max_message_mb: Annotated[int, Field(ge=1, le=2047)] = 64
    """Largest gRPC message that is accepted, in MiB."""


class PayloadsConfig(Section):
    change = Fixed("the payloads of the run are stored there")

    url: str | list[str] | None = None
    """Store of the tokens of groups. If none, the Redis of the journal. Else one or several Redis
    servers, file:///PATH, or an object store of fsspec, such as s3://BUCKET/PREFIX. Every rollout
    worker, policy rank and controller must reach it."""

    @property
    def urls(self) -> list[str]:
        return [self.url] if isinstance(self.url, str) else self.url or []

    @model_validator(mode="after")
    def _known(self) -> "PayloadsConfig":
        if self.url == []:
            raise ValueError("payloads.url is an empty list: name a store, or remove the setting")
        for url in self.urls:
            if urlsplit(url).scheme in REDIS_SCHEMES:
                check_ports("payloads.url", url)
            elif not _names_files(url):
                raise ValueError(
                    f"payloads.url: {url!r} names no store: use redis://HOST:PORT/0, file:///PATH "
                    "(an absolute path) or s3://BUCKET/PREFIX"
                )
            elif len(self.urls) > 1:
                raise ValueError(
                    "payloads.url: several stores are possible with Redis alone: name one"
                )
        return self


class WeightsConfig(Section):
    change = Fixed("trainers and rollout workers agree on it when they start")

    url: str | None = None
    """Store through which weights reach rollout workers that no trainer can reach: file:///PATH, or
    an object store of fsspec, such as s3://BUCKET/PREFIX. Every rollout worker, policy rank and
    controller must reach it. Default: trainers send them over connections of their own."""

    @model_validator(mode="after")
    def _known(self) -> "WeightsConfig":
        if self.url is not None and not _names_files(self.url):
            raise ValueError(
                f"weights.url: {self.url!r} names no store: use file:///PATH (an absolute path) or "
                "s3://BUCKET/PREFIX"
            )
        return self


def _names_files(url: str) -> bool:
    """True if the URL is one of a directory, or of an object store of fsspec."""
    parts = urlsplit(url)
    inside = parts.path.strip("/")
    if parts.scheme == "file":
        return bool(not parts.netloc and parts.path.startswith("/") and inside)
    return bool(parts.scheme and parts.scheme not in REDIS_SCHEMES and (parts.netloc or inside))


class RestConfig(Section):
    enabled: bool = True
    """Serve the REST interface, Prometheus metrics and the dashboard on every controller."""
    host: str | None = None
    """Address of the REST interface. Default: controller.host. Others than loopback need a
    token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """HTTP port of the first controller; the others use the next ones. 0: free ports."""


class MetricsConfig(Section):
    sinks: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """Receivers of the curves beside metrics.jsonl: tensorboard, wandb, mlflow (extras of the same
    name), or package.module:factory."""
    tensorboard_dir: LocalPath | None = None
    """Directory for TensorBoard's event files of many runs. Each has `<run.name>-<8 digits>` there.
    Default: `<run_dir>/tensorboard`."""
    project: str = "paceline"
    """Project in Weights & Biases, experiment in MLflow."""


class ArchiveConfig(Section):
    enabled: bool = True
    """Keep the groups of every step in `<run_dir>/samples`, for `paceline samples` and the
    dashboard: the metadata of all, and texts of as many as the leader has time to read."""
    max_mb: Positive = 1024
    """Largest total size of the files, in MiB. The oldest are deleted above it."""


AlertKind = Literal["fault", "stall", "nan", "held_out", "disk", "end"]


class AlertsConfig(Section):
    webhook_file: LocalPath | None = None
    """File with the URL of a webhook, which often contains a key. Each alert is posted to it as
    JSON: text, run, kind, id, step and t."""
    command: list[str] = Field(default_factory=list)
    """Command, as a list, that the leader runs for each alert with the JSON on its standard
    input."""
    on: list[AlertKind] = Field(default_factory=lambda: list(get_args(AlertKind)))
    """Kinds of alerts that are sent, but for end at most one in five minutes."""
    stall_s: Seconds = 1800.0
    """A run without a committed step for this many seconds has stalled."""
    disk_free_gb: Annotated[float, Field(ge=0)] = 10.0
    """Free space of the run directory's disk, in GB, below which an alert is sent."""


class AuthConfig(Section):
    token_file: LocalPath | None = None
    """File with the bearer token of every client. PACELINE_TOKEN overrides it."""
    tls_cert: LocalPath | None = None
    """PEM file with the controllers' certificate chain, with tls_key. Without it gRPC over TCP uses
    a certificate that follows from the token, and REST no TLS."""
    tls_key: LocalPath | None = None
    """PEM file with the private key of tls_cert."""
    tls_ca: LocalPath | None = None
    """PEM file with the root certificate by which clients verify. Default: tls_cert."""

    @model_validator(mode="after")
    def _pair(self) -> "AuthConfig":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("auth.tls_cert and auth.tls_key go together: set both or neither")
        return self
