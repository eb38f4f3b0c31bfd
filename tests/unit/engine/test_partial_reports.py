"""What every engine says of requests while they run."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from rollout_worker.engine.base import Completion, Engine, Finish, Request, SamplingParams
from testbed.tiny_model import make_endless_model
from tests.fixtures.engines import Reference, each_engine, make_test_engine, tiny_config

PROMPT = np.array([13, 5, 8, 3, 14], np.int32)
EVERY = 16
SLACK = 16
"""Tokens that an engine which is looked at from outside may have made meanwhile."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_endless_model(tmp_path_factory.mktemp("model"), hidden=128)


class Watched:
    """An engine that reports every 16 tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.reports: list[tuple[Completion | None, ...]] = []
        self.reported = asyncio.Event()
        engine.watch(EVERY, self._note)

    def _note(self, request: Request, samples: tuple[Completion | None, ...]) -> None:
        self.reports.append(samples)
        self.reported.set()

    async def generate(
        self, count: int, tokens: int, prefixes: tuple[Completion | None, ...] = ()
    ) -> tuple[Completion, ...]:
        params = SamplingParams(tokens, seed=5)
        return await self.engine.generate(Request("a", PROMPT, params, count, prefixes))


@pytest_asyncio.fixture(params=each_engine(), loop_scope="module", scope="module")
async def started(request: pytest.FixtureRequest, model: Path) -> AsyncIterator[Engine]:
    engine = make_test_engine(request.param, tiny_config(model, max_tokens=400))
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def watched(started: Engine, model: Path) -> Watched:
    """An idle engine; one test after another watches it anew."""
    await started.load_weights(started.version + 1, dict(Reference(model).model.named_parameters()))
    return Watched(started)


def assert_begins(sample: Completion, whole: Completion) -> None:
    n = len(sample.tokens)
    assert n and sample.tokens.tolist() == whole.tokens[:n].tolist()
    np.testing.assert_array_equal(sample.logprobs, whole.logprobs[:n])
    assert sum(length for _, length in sample.versions) == n


async def test_a_running_request_is_reported_every_so_many_tokens(watched: Watched) -> None:
    samples = await watched.generate(3, 200)
    longest = []
    for report in watched.reports:
        assert len(report) == 3
        for sample, whole in zip(report, samples, strict=True):
            if sample is not None:
                assert_begins(sample, whole)
                assert sample.versions == ((watched.engine.version, len(sample.tokens)),)
                assert sample.finish is Finish.PARTIAL or len(sample.tokens) == 200
        longest.append(max(len(s.tokens) for s in report if s is not None))
    gaps = np.diff([0, *longest])
    assert len(gaps) >= 200 // (EVERY + SLACK)
    assert gaps.min() >= EVERY and gaps.max() <= EVERY + SLACK


async def test_a_prefix_is_not_reported_before_something_was_added_to_it(watched: Watched) -> None:
    (whole,) = await watched.generate(1, 40)
    watched.reports.clear()
    spans = ((watched.engine.version, 10),)
    begun = Completion(whole.tokens[:10], whole.logprobs[:10], spans, Finish.PARTIAL)
    (again,) = await watched.generate(1, 40, (begun,))
    ((first,), *_) = watched.reports
    assert first is not None and 10 + EVERY <= len(first.tokens) <= 10 + EVERY + SLACK
    assert_begins(first, again)


async def test_reported_tokens_carry_the_version_that_made_them(
    watched: Watched, model: Path
) -> None:
    weights = dict(Reference(model).model.named_parameters())
    before = watched.engine.version
    running = asyncio.create_task(watched.generate(2, 400))
    await watched.reported.wait()
    await watched.engine.load_weights(before + 1, weights)
    samples = await running
    for report in watched.reports:
        for sample, whole in zip(report, samples, strict=True):
            assert sample is not None
            assert_begins(sample, whole)
            if sample.finish is Finish.PARTIAL:
                spans = np.repeat(*np.array(whole.versions).T)[: len(sample.tokens)]
                assert np.repeat(*np.array(sample.versions).T).tolist() == spans.tolist()
    assert {v for v, _ in samples[0].versions} == {before, before + 1}
