"""Spans as OpenTelemetry has them, and over the wire from a real controller."""

import asyncio
import gzip
import http.server
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "opentelemetry.sdk", reason="OpenTelemetry is not installed: pip install 'paceline[otel]'"
)

from controller.export.traces import Span, check_telemetry, readable
from paceline.config.load import ConfigError
from paceline.config.schema import Config
from testbed.fleets.controller_processes import Controllers
from testbed.fleets.controllers import running_controllers, until, working_fleet
from tests.fixtures.rest import train


def config(**telemetry: object) -> Config:
    sections = {"model": {"path": "m"}, "data": {"path": "d"}, "telemetry": telemetry}
    return Config.model_validate({**sections, "run": {"name": "arithmetic"}})


def exported(*spans: Span, run: str = "paceline-1") -> list[Any]:
    return [readable(span, "arithmetic", run) for span in spans]


LEASE = Span("t1", "lease/1", 10.0, 12.5, {"attempt": 1}, error="owner_died")
TASK = Span("t1", "task", 10.0, 20.0, {"outcome": "trained"}, parent="")


def test_spans_have_their_times_and_parents_and_say_what_failed() -> None:
    lease, task = exported(LEASE, TASK)
    assert (lease.start_time, lease.end_time) == (10_000_000_000, 12_500_000_000)
    assert lease.context.trace_id == task.context.trace_id
    assert lease.parent.span_id == task.context.span_id and task.parent is None
    assert not lease.status.is_ok and lease.status.description == "owner_died"
    assert lease.attributes == {"paceline.task": "t1", "paceline.attempt": 1}
    assert lease.resource.attributes["service.name"] == "paceline"


def test_another_leader_makes_the_same_ids_and_another_run_others() -> None:
    ids = [(s.context.trace_id, s.context.span_id) for s in exported(LEASE, TASK)]
    assert [(s.context.trace_id, s.context.span_id) for s in exported(LEASE, TASK)] == ids
    other = exported(LEASE, TASK, run="paceline-2")
    assert not {s.context.trace_id for s in other} & {trace for trace, _ in ids}


def test_what_cannot_be_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    check_telemetry(config())
    check_telemetry(config(otlp_endpoint="http://127.0.0.1:4318"))
    with pytest.raises(ConfigError, match="write it as http://HOST:4318"):
        check_telemetry(config(otlp_endpoint="127.0.0.1:4318"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'paceline\[otel\]'"):
        check_telemetry(config(otlp_endpoint="http://127.0.0.1:4318"))


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The address of an OTLP receiver, and the spans it has got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    got.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()


WHOLE = {"task", "lease", "generate", "reward", "step"}


def whole_traces(got: list[Any]) -> set[bytes]:
    names = defaultdict(set)
    for span in list(got):
        names[span.trace_id].add(span.name)
    return {trace for trace, found in names.items() if found == WHOLE}


async def _kill_the_leader(controllers: Controllers, got: list[Any]) -> set[bytes]:
    """Traces that were whole before."""
    async with working_fleet(controllers, rollouts=1) as (trainers, _):
        await until(lambda: len(whole_traces(got)) >= 4)
        before = whole_traces(got)
        controllers.started[0].kill()
        steps = trainers[0].timings.steps
        await until(lambda: trainers[0].timings.steps >= steps + 3)
        await until(lambda: len(whole_traces(got)) >= len(before) + 8)
    return before


def test_a_real_runs_samples_arrive_at_a_collector_also_from_the_next_leader(
    tmp_path: Path,
) -> None:
    with collector() as (url, got):
        settings: dict[str, Any] = {
            "telemetry": {"otlp_endpoint": url, "share": 0.2},
            "fleet": {"lease_ttl_s": 60.0},
        }
        with running_controllers(tmp_path, 2, **settings) as controllers:
            asyncio.run(_kill_the_leader(controllers, got))
        ids = [(s.trace_id, s.span_id) for s in got]
    assert len(ids) == len(set(ids)), "no span is told by both"
    assert all(s.start_time_unix_nano <= s.end_time_unix_nano for s in got)


def test_a_collector_that_is_not_there_delays_nobody(tmp_path: Path) -> None:
    settings = {"telemetry": {"otlp_endpoint": "http://127.0.0.1:9", "share": 1.0}}
    with running_controllers(tmp_path, 1, **settings) as controllers:
        asyncio.run(train(controllers, 3))
        process = controllers.started[0].process
        process.terminate()
        assert process.wait(60) == 0
