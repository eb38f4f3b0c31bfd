"""Traces of samples to an OpenTelemetry collector, made from what the leader has journalled.

    journal entry ──► bounded queue ──► thread: lifelines ──► spans ──► exporter's own thread

Trace and span ids come from the run, the task and the part of its life: a new leader goes on in the
trace that the one before has begun. A collector that is slow or gone costs spans, never time.
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

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.process.structured_log import event
from paceline.run_view.sample_spans import SampleSpans, Span

log = logging.getLogger(__name__)

LOOK_S = 0.25
MOST_WAITING = 20_000
"""Journal entries; beyond it the oldest are left out."""
NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class NoTelemetry(BadInput):
    """Says which package is missing and how to get it."""


def check_telemetry(config: Config) -> None:
    """Raises NoTelemetry where an endpoint is set that cannot be served."""
    endpoint = config.telemetry.otlp_endpoint
    if endpoint is None:
        return
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).netloc:
        raise NoTelemetry(f"telemetry.otlp_endpoint = {endpoint!r}: write it as http://HOST:4318")
    for name in NEEDED:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise NoTelemetry(
                "telemetry.otlp_endpoint is set, but OpenTelemetry is not installed: "
                "pip install 'paceline[otel]'"
            )


class Traces:
    """``remember`` what came before this term, ``start``, ``record`` what comes."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._run = ""
        self._lifelines = SampleSpans(config.run.name, config.telemetry.share)
        self._entries: deque[tuple[float, Sequence[Mapping[str, Any]]]] = deque(maxlen=MOST_WAITING)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="traces", daemon=True)
        self.failed = False

    def remember(self, t: float, events: Sequence[Mapping[str, Any]]) -> None:
        """Before ``start``: earlier leaders have sent the spans that end here."""
        for one in events:
            for _ in self._lifelines.take(t, one):
                pass

    def start(self, run: str) -> None:
        """``run``: an id that no other run has, and every leader of this one."""
        self._run = run
        if not self._closing.is_set():
            self._thread.start()

    def record(self, t: float, events: Sequence[Mapping[str, Any]]) -> None:
        """One journal entry; returns at once."""
        if not self.failed:
            self._entries.append((t, events))

    def begin_close(self) -> None:
        self._closing.set()

    def join(self, timeout_s: float) -> bool:
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        try:
            tracer = otlp_tracer(self._config, self._run)
            closing = False
            while not closing:
                # Looked at before the entries: those that came before it was set are sent.
                closing = self._closing.wait(LOOK_S)
                while self._entries:
                    t, events = self._entries.popleft()
                    for one in events:
                        for span in self._lifelines.take(t, one):
                            tracer.send(span)
            tracer.close()
        except Exception as error:  # of a library that the run does not depend on
            self.failed = True
            self._entries.clear()
            event(log, "traces ended", logging.WARNING, why=f"{type(error).__name__}: {error}")


class Tracer:
    """Spans of lifelines as OpenTelemetry's, through ``provider``."""

    def __init__(self, provider: Any, ids: Any, run: str) -> None:
        self._provider = provider
        self._ids = ids
        self._tracer = provider.get_tracer("paceline")
        self._run = run

    def send(self, span: Span) -> None:
        from opentelemetry import trace
        from opentelemetry.trace import Status, StatusCode

        trace_id = _number(16, self._run, span.task_id)
        context = None
        if span.parent:
            parent = trace.SpanContext(
                trace_id,
                _number(8, self._run, span.task_id, span.parent),
                is_remote=False,
                trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        self._ids.next(trace_id, _number(8, self._run, span.task_id, span.key))
        started = self._tracer.start_span(
            span.name,
            context,
            start_time=_ns(span.start),
            attributes={"paceline.task": span.task_id, **span.attributes},
        )
        if span.error:
            started.set_status(Status(StatusCode.ERROR, span.error))
        started.end(_ns(max(span.start, span.end)))

    def close(self) -> None:
        """Sends what waits, for as long as the exporter's time limit."""
        self._provider.shutdown()


def make_tracer(config: Config, run: str, processor: Any) -> Tracer:
    """``processor``: a span processor of the OpenTelemetry SDK. ``run``: what ids are made from."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class Ids(IdGenerator):  # type: ignore[misc]
        """Hands out the ids it was told to. Spans are made by one thread."""

        _trace = _span = 1

        def next(self, trace_id: int, span_id: int) -> None:
            self._trace, self._span = trace_id, span_id

        def generate_trace_id(self) -> int:
            return self._trace

        def generate_span_id(self) -> int:
            return self._span

    ids = Ids()
    resource = Resource.create({"service.name": "paceline", "paceline.run": config.run.name})
    provider = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return Tracer(provider, ids, run)


def otlp_tracer(config: Config, run: str) -> Tracer:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    endpoint = config.telemetry.otlp_endpoint or ""
    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=5)
    return make_tracer(config, run, BatchSpanProcessor(exporter, schedule_delay_millis=1000))


def _number(size: int, *parts: str) -> int:
    """From ``parts``, the same in every process; never 0, which stands for no id."""
    digest = hashlib.sha256("\0".join(parts).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1


def _ns(t: float) -> int:
    return round(t * 1e9)
