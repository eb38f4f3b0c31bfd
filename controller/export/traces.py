"""OpenTelemetry traces of samples, derived from what the leader has journalled.

    task ├─ lease ──────────────────────┤         ├─ step ─┤
         │    ├─ generate ──┤─ reward ─┤

*lease* is one attempt, up to the accepted group or the reason of its loss; *generate* and *reward*
lie at its end and have the durations that the worker reported. *step* lasts from the step's opening
to its commit. A task that is trained again after a rollback gets another step span in the same
trace.

Trace and span ids are derived from the run, the task and the span's key, so a new leader continues
the traces of its predecessor. If the collector is slow or gone, spans are lost; the run is never
delayed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from paceline.config.load import ConfigError
from paceline.config.schema import Config
from paceline.observe.drain import Drain
from paceline.observe.vocabulary import EventType
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

MOST_WAITING = 20_000
"""Journal entries waiting to be turned into spans; beyond it the oldest are dropped."""


def check_telemetry(config: Config) -> None:
    """Raises ConfigError if the endpoint is malformed or OpenTelemetry is not installed."""
    endpoint = config.telemetry.otlp_endpoint
    if endpoint is None:
        return
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise ConfigError(f"telemetry.otlp_endpoint = {endpoint!r}: write it as http://HOST:4318")
    if importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError(
            "telemetry.otlp_endpoint is set, but OpenTelemetry is not installed: "
            "pip install 'paceline[otel]'"
        )


@dataclass(frozen=True, slots=True)
class Span:
    """``key`` identifies the span among those of one task; the task's own key is "task"."""

    task_id: str
    key: str
    start: float  # Unix seconds
    end: float
    about: Mapping[str, Any]  # attributes, without their prefix
    error: str = ""  # reason for which the work failed; empty if it succeeded
    parent: str = "task"  # key of the enclosing span; empty: it is the task's own

    @property
    def name(self) -> str:
        return self.key.partition("/")[0]


@dataclass(slots=True)
class SampleSpans:
    """Spans of the traced tasks, a ``share`` of all: the same ones for every leader of ``run``.
    Pure: events in, spans out."""

    run: str
    share: float = 1.0
    _began: dict[str, float] = field(default_factory=dict)
    """Tasks that were not trained yet, and when they were leased first."""
    _leases: dict[str, dict[int, tuple[str, float]]] = field(default_factory=dict)
    """Running attempts of each task: worker and start time."""
    _step: dict[str, Any] = field(default_factory=dict)
    """Event that opened the step, with its time ``t``; empty: none is open."""

    def traced(self, task_id: str) -> bool:
        return zlib.crc32(f"{self.run}/{task_id}".encode()) < self.share * 2**32

    def take(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        """Spans that end with ``event``, which was journalled at ``t`` (unix seconds)."""
        match event.get("type"):
            case EventType.TASKS_LEASED:
                for task_id, attempt, kind, *_ in event["leases"]:
                    if kind == "train" and self.traced(task_id):
                        self._began.setdefault(task_id, t)
                        leases = self._leases.setdefault(task_id, {})
                        leases[int(attempt)] = str(event["worker_id"]), t
            case EventType.GROUP_ACCEPTED if self.traced(event["group"]["task_id"]):
                yield from self._accepted(t, str(event["worker_id"]), event["group"])
            case EventType.TASK_RELEASED:
                yield from self._lost(t, event, [int(event["attempt"])])
            case EventType.TASK_DROPPED:
                task_id, reason = event["task_id"], str(event["reason"])
                yield from self._lost(t, event, sorted(self._leases.get(task_id, {})))
                self._leases.pop(task_id, None)
                if (began := self._began.pop(task_id, None)) is not None:
                    about = {"outcome": "dropped", "reason": reason}
                    yield Span(task_id, "task", began, t, about, reason, parent="")
            case EventType.STEP_OPENED:
                self._step = {**event, "t": t}
                # The span of a task that is trained again is already written.
                for task_id in () if event["replay"] else filter(self.traced, event["groups"]):
                    self._began.setdefault(task_id, t)
            case EventType.STEP_RESHARDED if self._step:
                self._step |= {name: event[name] for name in ("mesh_epoch", "shards")}
            case EventType.STEP_COMMITTED | EventType.STEP_ABORTED:
                step, self._step = self._step, {}
                if step and step["step"] == event["step"]:
                    yield from self._stepped(t, event, step)

    def _lost(self, t: float, event: Mapping[str, Any], attempts: Sequence[int]) -> Iterator[Span]:
        task_id, reason = event["task_id"], str(event["reason"])
        leases = self._leases.get(task_id, {})
        for attempt in attempts:
            if attempt in leases:
                worker, begun = leases.pop(attempt)
                about = {"worker": worker, "attempt": attempt}
                yield Span(task_id, f"lease/{attempt}", begun, t, about, reason)

    def _accepted(self, t: float, worker_id: str, group: Mapping[str, Any]) -> Iterator[Span]:
        task_id, attempt = group["task_id"], int(group["attempt"])
        # A lease of an earlier leader is known by its end alone.
        begun = t - group["reward_s"] - group["generate_s"]
        self._began.setdefault(task_id, begun)
        _, begun = self._leases.pop(task_id, {}).get(attempt, (worker_id, begun))
        scored = max(begun, t - float(group["reward_s"]))
        generated = max(begun, scored - float(group["generate_s"]))
        about = {"worker": worker_id, "attempt": attempt}
        made = {
            **about,
            "sequences": group["sequences"],
            "tokens": group["tokens"],
            "version.min": group["min_version"],
            "version.max": group["max_version"],
        }
        reward, lease = {"reward.mean": float(group["reward_mean"])}, f"lease/{attempt}"
        yield Span(task_id, f"generate/{attempt}", generated, scored, made, parent=lease)
        yield Span(task_id, f"reward/{attempt}", scored, t, reward, parent=lease)
        yield Span(task_id, lease, begun, t, about)

    def _stepped(
        self, t: float, event: Mapping[str, Any], step: Mapping[str, Any]
    ) -> Iterator[Span]:
        """Ends the step of its tasks, with a commit or without."""
        groups: list[str] = step["groups"]
        replicas = {groups[i]: worker for worker, shard in step["shards"].items() for i in shard}
        number, error = int(step["step"]), str(event.get("reason", ""))
        committed = event["type"] == EventType.STEP_COMMITTED
        end = f"{event['version']}" if committed else f"{step['version']}/aborted"
        for task_id in filter(self.traced, groups):
            replica = replicas.get(task_id, "")
            about = {"step": number, "replica": replica, "mesh_epoch": step["mesh_epoch"]}
            yield Span(task_id, f"step/{number}/{end}", step["t"], t, about, error)
            if committed and (began := self._began.pop(task_id, None)) is not None:
                trained = {"outcome": "trained", "step": number}
                yield Span(task_id, "task", began, t, trained, parent="")


class Traces(Drain[tuple[float, Sequence[Mapping[str, Any]]]]):
    """Takes (time, events) of journal entries; the SDK's batch processor sends their spans."""

    def __init__(self, config: Config, run: str) -> None:
        """``run``: an id unique to this run and the same for each of its leaders."""
        super().__init__("traces", most=MOST_WAITING)
        self._config, self._run = config, run

    def _serve(self) -> None:
        name, telemetry = self._config.run.name, self._config.telemetry
        spans = SampleSpans(name, telemetry.share)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            url = telemetry.otlp_endpoint or ""
            if urlsplit(url).path in ("", "/"):
                url = url.rstrip("/") + "/v1/traces"
            exporter = OTLPSpanExporter(endpoint=url, timeout=5)
            processor = BatchSpanProcessor(exporter, schedule_delay_millis=1000)
            for entries in self._batches():
                ended = (s for t, events in entries for e in events for s in spans.take(t, e))
                for span in ended:
                    processor.on_end(readable(span, name, self._run))
            processor.shutdown()  # sends the rest, within the exporter's time limit
        except Exception as error:  # of a library that the run does not depend on
            event(log, "traces ended", logging.WARNING, why=f"{type(error).__name__}: {error}")


def readable(span: Span, run_name: str, run: str) -> Any:
    """A ready-made span of the SDK, whose own tracer would choose the ids."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

    def context(key: str) -> Any:
        trace, sampled = _id(16, run, span.task_id), TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace, _id(8, run, span.task_id, key), False, sampled)

    return ReadableSpan(
        span.name,
        context=context(span.key),
        parent=context(span.parent) if span.parent else None,
        resource=_resource(run_name),
        attributes={"paceline.task": span.task_id}
        | {f"paceline.{name}": value for name, value in span.about.items()},
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=round(span.start * 1e9),
        end_time=round(max(span.start, span.end) * 1e9),
    )


@cache
def _resource(run_name: str) -> Any:
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": "paceline", "paceline.run": run_name})


def _id(size: int, *parts: str) -> int:
    """An id of ``size`` bytes, the same in every process; never 0, which means "no id"."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1
