"""Metrics of scorers: what a server measures of its requests is what Prometheus is told."""

from contextlib import nullcontext
from typing import Any

import grpc
import numpy as np
import pytest

from controller.rest.prometheus import scorer_metrics
from paceline.v1 import admin_pb2, scorer_pb2
from scorer_worker.scorer import CompletionScorer, NoScore, Score
from scorer_worker.server import ScorerServer
from tests.fixtures.configs import config_of

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
    config = config_of(
        run={"name": "one"}, scorers={"helpful": {"kind": "reward_model", "path": "/rm"}}
    )
    scorer = Scripted()
    scorer.server = ScorerServer(config, "helpful", scorer, "token")
    return scorer.server, scorer


def request(count: int) -> scorer_pb2.ScoreRequest:
    made = scorer_pb2.ScoreRequest(run="one", scorer="helpful", prompt_tokens=TOKENS)
    for _ in range(count):
        made.completions.add(tokens=TOKENS)
    return made


@pytest.mark.parametrize("fails", [False, True])
async def test_completions_wait_while_they_are_computed_and_count_only_if_they_are_scored(
    fails: bool,
) -> None:
    server, scorer = served()
    scorer.fails = fails
    with pytest.raises(RuntimeError, match="DATA_LOSS") if fails else nullcontext():
        await server._score(request(3), Context())  # type: ignore[arg-type]
    assert (scorer.seen, server.queued, server.scored) == (3, 0, 0 if fails else 3)
    assert (server.scored_requests, server.request_s > 0) == ((0, False) if fails else (1, True))


def test_prometheus_gets_what_scorers_have_counted() -> None:
    gauges = {"scored": 8.0, "queued": 2.0, "scored_requests": 4.0, "request_s": 0.5}
    worker = admin_pb2.WorkerStatus(worker_id="scorer-helpful-0", scorer="helpful", gauges=gauges)
    silent = admin_pb2.WorkerStatus(worker_id="one that has not reported")
    samples = [s for family in scorer_metrics([worker, silent]) for s in family.samples]
    named = {"worker": "scorer-helpful-0", "scorer": "helpful"}
    assert all(sample.labels == named for sample in samples)
    assert {sample.name: sample.value for sample in samples} == {
        "paceline_scorer_completions_total": 8.0,
        "paceline_scorer_queued_completions": 2.0,
        "paceline_scorer_requests_total": 4.0,
        "paceline_scorer_request_seconds_total": 0.5,
    }
