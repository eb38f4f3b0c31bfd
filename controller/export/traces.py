"""OpenTelemetry traces of samples, derived from what the leader has journalled.

Trace and span ids are derived from the run, the task and the span's key, so a new leader continues
the traces of its predecessor. If the collector is slow or gone, spans are lost; the run is never
delayed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from paceline.config.load import ConfigError
from paceline.config.schema import Config
from paceline.observe.drain import Drain
from paceline.observe.spans import SampleSpans, Span
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
