"""Prometheus metrics of the scorers: completions that they scored, those that wait, and the time of
their requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from paceline.score_times import histogram_of
from paceline.v1 import admin_pb2

LABELS = ("worker", "scorer")


def scorer_metrics(workers: Iterable[admin_pb2.WorkerStatus]) -> Iterator[Metric]:
    """Each family exists without a scorer too, so that its name can be looked up."""
    scored = CounterMetricFamily(
        "paceline_scorer_completions_total", "Completions that it scored", labels=LABELS
    )
    queued = GaugeMetricFamily(
        "paceline_scorer_queued_completions", "Completions that wait for its score", labels=LABELS
    )
    times = HistogramMetricFamily(
        "paceline_scorer_request_duration_seconds",
        "From a request's arrival to its scores",
        labels=LABELS,
    )
    for worker in workers:
        labels = (worker.worker_id, worker.scorer)
        if "scored" in worker.gauges:
            scored.add_metric(labels, worker.gauges["scored"])
        if "queued" in worker.gauges:
            queued.add_metric(labels, worker.gauges["queued"])
        if (found := histogram_of(worker.gauges)) is not None:
            buckets, sum_s = found
            times.add_metric(labels, buckets=buckets, sum_value=sum_s)
    yield from (scored, queued, times)
