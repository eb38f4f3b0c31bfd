"""OpenTelemetry traces of samples, derived from what the leader has journalled.

    journal entry ──► bounded queue ──► thread: SampleSpans ──► Tracer ──► exporter's own thread

Trace and span ids are derived from the run, the task and the span's key, so a new leader continues
the traces of its predecessor. If the collector is slow or gone, spans are lost; the run is never
delayed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from paceline.config.load import ConfigError
from paceline.config.schema import Config
from paceline.observe.sample_spans import SampleSpans, Span
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

POLL_S = 0.25
MOST_WAITING = 20_000
"""Journal entries waiting to be turned into spans; beyond it the oldest are dropped."""
NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def check_telemetry(config: Config) -> None:
    """Raises ConfigError if the endpoint is malformed or OpenTelemetry is not installed."""
    endpoint = config.telemetry.otlp_endpoint
    if endpoint is None:
        return
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise ConfigError(f"telemetry.otlp_endpoint = {endpoint!r}: write it as http://HOST:4318")
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise ConfigError(
                "telemetry.otlp_endpoint is set, but OpenTelemetry is not installed: "
                "pip install 'paceline[otel]'"
            )


class Traces:
    """The traces of one leader: ``remember`` earlier entries, ``start``, then ``record`` new ones."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._run = ""
        self._spans = SampleSpans(config.run.name, config.telemetry.share)
        self._entries: deque[tuple[float, Sequence[Mapping[str, Any]]]] = deque(maxlen=MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="traces", daemon=True)
        self.failed = False

    def remember(self, t: float, events: Sequence[Mapping[str, Any]]) -> None:
        """Takes an entry of an earlier leader, before ``start``. That leader has sent its spans."""
        for one in events:
            for _ in self._spans.take(t, one):
                pass

    def start(self, run: str) -> None:
        """``run``: an id unique to this run and the same for each of its leaders."""
        self._run = run
        if not self._closing.is_set():
            self._thread.start()

    def record(self, t: float, events: Sequence[Mapping[str, Any]]) -> None:
        """Takes one journal entry; returns at once."""
        if not self.failed:
            self._entries.append((t, events))

    def begin_close(self, outcome: str | None) -> None:
        """Asks the thread to send what was recorded and to end."""
        self._closing.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread; whether it has ended."""
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            tracer = otlp_tracer(self._config, self._run)
            closing = False
            while not closing:
                # Read before the entries: entries recorded before the close are still sent.
                closing = self._closing.wait(POLL_S)
                while self._entries:
                    t, events = self._entries.popleft()
                    for one in events:
                        for span in self._spans.take(t, one):
                            tracer.send(span)
            tracer.close()
        except Exception as error:  # of a library that the run does not depend on
            self.failed = True
            self._entries.clear()
            event(log, "traces ended", logging.WARNING, why=f"{type(error).__name__}: {error}")


class Tracer:
    """Hands spans to ``processor``, a span processor of the OpenTelemetry SDK.

    Spans are built ready-made, because the SDK's own tracer chooses the ids.
    """

    def __init__(self, run_name: str, run: str, processor: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._run = run
        self._processor = processor
        self._resource = Resource.create({"service.name": "paceline", "paceline.run": run_name})
        self._scope = InstrumentationScope("paceline")

    def send(self, span: Span) -> None:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Status, StatusCode

        self._processor.on_end(
            ReadableSpan(
                span.name,
                context=self._context(span.task_id, span.key),
                parent=self._context(span.task_id, span.parent) if span.parent else None,
                resource=self._resource,
                attributes={"paceline.task": span.task_id, **span.attributes},
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
                start_time=_ns(span.start),
                end_time=_ns(max(span.start, span.end)),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """Sends the remaining spans, within the exporter's time limit."""
        self._processor.shutdown()

    def _context(self, task_id: str, key: str) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(
            trace_id=_id(16, self._run, task_id),
            span_id=_id(8, self._run, task_id, key),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )


def otlp_tracer(config: Config, run: str) -> Tracer:
    """A tracer that exports to ``telemetry.otlp_endpoint`` over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    endpoint = config.telemetry.otlp_endpoint or ""
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
    return Tracer(config.run.name, run, BatchSpanProcessor(exporter, schedule_delay_millis=1000))


def _id(size: int, *parts: str) -> int:
    """An id of ``size`` bytes, the same in every process; never 0, which means "no id"."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1


def _ns(t: float) -> int:
    return round(t * 1e9)
