"""Metrics of scorers: what a server measures of its requests is what Prometheus is told."""

from typing import Any

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from controller.rest.prometheus import scorer_metrics
from paceline.config.schema import Config
from paceline.score_times import BOUNDS_S, ScoreTimes, histogram_of
from paceline.v1 import admin_pb2, scorer_pb2
from scorer_worker.scorer import CompletionScorer, NoScore, Score
from scorer_worker.server import ScorerServer

TOKENS = np.ones(2, "<i4").tobytes()


class Scripted(CompletionScorer):
    """Fails if told to; looks at the server while it computes."""

    server: ScorerServer
    fails = False
    seen = -1

    async def score(self, items: Any) -> list[Score]:
        self.seen = self.server.queued
        if self.fails:
            raise NoScore("no number")
        return [0.5] * len(items)


class Context:
    async def abort(self, status: grpc.StatusCode, why: str) -> None:
        raise RuntimeError(status.name)


def served() -> tuple[ScorerServer, Scripted]:
    config = Config.model_validate(
        {
            "run": {"name": "one"},
            "model": {"path": "/m"},
            "data": {"path": "rows.jsonl"},
            "scorers": {"helpful": {"kind": "reward_model", "path": "/rm"}},
        }
    )
    scorer = Scripted()
    scorer.server = ScorerServer(config, "helpful", scorer, "token")
    return scorer.server, scorer


def request(count: int) -> scorer_pb2.ScoreRequest:
    made = scorer_pb2.ScoreRequest(run="one", scorer="helpful", prompt_tokens=TOKENS)
    for _ in range(count):
        made.completions.add(tokens=TOKENS)
    return made


async def test_completions_wait_while_they_are_computed_and_count_once_they_are_scored() -> None:
    server, scorer = served()
    await server._score(request(3), Context())  # type: ignore[arg-type]
    assert (scorer.seen, server.queued, server.scored) == (3, 0, 3)
    assert server.times.gauges["request_s_le_inf"] == 1


async def test_a_request_that_fails_leaves_the_queue_and_counts_as_nothing() -> None:
    server, scorer = served()
    scorer.fails = True
    with pytest.raises(RuntimeError, match="DATA_LOSS"):
        await server._score(request(3), Context())  # type: ignore[arg-type]
    assert (scorer.seen, server.queued, server.scored) == (3, 0, 0)
    assert server.times.gauges["request_s_le_inf"] == 0


def test_times_on_a_bound_are_in_its_bucket_and_counts_are_cumulative() -> None:
    times = ScoreTimes()
    for seconds in (0.01, 0.03, 1e9):
        times.add(seconds)
    found = histogram_of(times.gauges)
    assert found is not None
    buckets, sum_s = dict(found[0]), found[1]
    assert (buckets["0.01"], buckets["0.025"], buckets["0.05"], buckets["60.0"]) == (1, 1, 2, 2)
    assert buckets["+Inf"] == 3 and len(buckets) == len(BOUNDS_S) + 1
    assert sum_s == pytest.approx(1e9 + 0.04)


def test_gauges_without_every_bucket_are_no_histogram() -> None:
    gauges = ScoreTimes().gauges
    del gauges["request_s_le_0.1"]
    assert histogram_of(gauges) is None and histogram_of({}) is None


class _One(Collector):
    def __init__(self, workers: list[admin_pb2.WorkerStatus]) -> None:
        self._workers = workers

    def collect(self) -> list[Metric]:
        return list(scorer_metrics(self._workers))


def exposed(workers: list[admin_pb2.WorkerStatus]) -> dict[str, float]:
    """Samples of one worker by name, those of a bucket with its bound."""
    registry = CollectorRegistry()
    registry.register(_One(workers))
    text = generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert (sample.labels["worker"], sample.labels["scorer"]) == (
                "scorer-helpful-0",
                "helpful",
            )
            found[sample.name + sample.labels.get("le", "")] = sample.value
    return found


def test_prometheus_gets_the_histogram_the_queue_and_the_count() -> None:
    times = ScoreTimes()
    times.add(0.2)
    gauges = {"scored": 8.0, "queued": 2.0, **times.gauges}
    worker = admin_pb2.WorkerStatus(worker_id="scorer-helpful-0", scorer="helpful", gauges=gauges)
    found = exposed([worker, admin_pb2.WorkerStatus(worker_id="one that has not reported")])
    assert found["paceline_scorer_completions_total"] == 8
    assert found["paceline_scorer_queued_completions"] == 2
    duration = "paceline_scorer_request_duration_seconds"
    assert (found[f"{duration}_bucket0.1"], found[f"{duration}_bucket0.25"]) == (0, 1)
    assert (found[f"{duration}_count"], found[f"{duration}_sum"]) == (1, pytest.approx(0.2))
