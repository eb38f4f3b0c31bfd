"""What every engine says of requests while they run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from controller.store.partial_rollouts import whole_group
from paceline.rpc.client import RequestRefused
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Engine, Finish, Request, SamplingParams
from rollout_worker.tasks.held_tasks import HeldTasks
from rollout_worker.tasks.partial_rollouts import PartialReporter
from rollout_worker.tasks.task_messages import partial_group
from testbed.tiny_model import make_endless_model
from tests.fixtures.engines import ENGINES, Reference, make_test_engine, tiny_config

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


@pytest_asyncio.fixture(params=ENGINES, loop_scope="module", scope="module")
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


Room = Callable[[int], bool]


class CountingSession:
    """A controller that holds what it is sent, and counts the bytes; ``lost`` tokens vanish once.
    ``room(n)``: whether the store has room when report ``n`` comes."""

    caller = common_pb2.Caller(worker_id="rollout-0", incarnation=1)

    def __init__(self, lost: int = 0, room: Room = lambda _: True) -> None:
        self.bytes = 0
        self.lost = lost
        self.room = room
        self.reports = 0
        self.chunks: list[rollout_pb2.PartialGroup] = []

    @property
    def held(self) -> int:
        return sum(len(c.tokens) // 4 for chunk in self.chunks for c in chunk.completions)

    async def call(
        self, method: str, request: rollout_pb2.PartialRequest
    ) -> rollout_pb2.PartialReply:
        (group,) = request.groups
        self.bytes += request.ByteSize()
        self.reports += 1
        if self.lost and len(self.chunks) == 3:
            self.lost = 0
            self.chunks.pop()
        if self.room(self.reports):
            if group.offset == 0:
                self.chunks = [group]
            elif group.offset == self.held:
                self.chunks.append(group)
        accepted = rollout_pb2.VERDICT_ACCEPTED
        result = rollout_pb2.PartialResult(task=group.task, verdict=accepted, held=self.held)
        return rollout_pb2.PartialReply(results=[result])


async def reported(engine: Engine, session: CountingSession) -> tuple[Completion, ...]:
    """The completions of one task, which the worker's own reporter reports every 64 tokens."""
    held = HeldTasks()
    task = common_pb2.TaskRef(task_id="t0", attempt=1)
    held_task = held.add(rollout_pb2.Lease(task=task, group_size=3))
    assert held_task is not None
    reporter = PartialReporter(session, held, 1 << 20)  # type: ignore[arg-type]
    request = Request(held_task.request_id, PROMPT, SamplingParams(400, seed=5), 3)
    held_task.request = request
    engine.watch(64, reporter.note)
    sending = asyncio.create_task(reporter.run())
    completions = await engine.generate(request)
    reporter.note(request, completions)
    await reporter.flush()
    sending.cancel()
    engine.watch(0, lambda *_: None)
    return completions


async def test_reports_carry_every_token_once(started: Engine, model: Path) -> None:
    await started.load_weights(started.version + 1, dict(Reference(model).model.named_parameters()))
    session = CountingSession()
    completions = await reported(started, session)
    payload = partial_group(session.chunks[0].task, PROMPT, completions)
    assert len(session.chunks) > 3
    assert whole_group([chunk.SerializeToString() for chunk in session.chunks]) == payload
    assert session.bytes <= 1.2 * payload.ByteSize()


async def test_what_the_controller_has_lost_is_sent_again_from_there(
    started: Engine, model: Path
) -> None:
    await started.load_weights(started.version + 1, dict(Reference(model).model.named_parameters()))
    session = CountingSession(lost=1)
    completions = await reported(started, session)
    payload = partial_group(session.chunks[0].task, PROMPT, completions)
    assert session.lost == 0
    assert whole_group([chunk.SerializeToString() for chunk in session.chunks]) == payload


class LongTask:
    """One task of 32,768 tokens, which the worker's own reporter reports every 64 tokens."""

    tokens = 32_768

    def __init__(self, session: CountingSession) -> None:
        self.session = session
        held = HeldTasks()
        held_task = held.add(rollout_pb2.Lease(task=common_pb2.TaskRef(task_id="t0"), group_size=1))
        assert held_task is not None
        self.request = Request(held_task.request_id, PROMPT, SamplingParams(self.tokens), 1)
        held_task.request = self.request
        self.reporter = PartialReporter(session, held, 1 << 26)  # type: ignore[arg-type]
        self.ids = np.arange(self.tokens, dtype=np.int32)
        self.logprobs = np.zeros(self.tokens, np.float32)
        self.made = 0

    def begin(self, count: int) -> Completion:
        """Its first tokens."""
        return Completion(self.ids[:count], self.logprobs[:count], ((0, count),), Finish.PARTIAL)

    async def run(self, until: int = tokens) -> None:
        while self.made < until:
            self.made += 64
            self.reporter.note(self.request, (self.begin(self.made),))
            await self.reporter.flush()


ROOM: dict[str, Room] = {
    "always": lambda _: True,
    "never": lambda _: False,
    "at-first": lambda report: report < 100,
    "every-other-time": lambda report: report % 2 == 0,
    "now-and-then": lambda report: report % 7 == 0,
}


@pytest.mark.parametrize("room", ROOM)
async def test_a_full_store_costs_no_bytes(room: str) -> None:
    session = CountingSession(room=ROOM[room])
    task = LongTask(session)
    await task.run()
    payload = partial_group(common_pb2.TaskRef(task_id="t0"), PROMPT, [task.begin(task.tokens)])
    assert session.bytes <= 1.2 * payload.ByteSize()


class RefusingSession(CountingSession):
    """A controller that refuses every report, or answers about none of its tasks."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error

    async def call(
        self, method: str, request: rollout_pb2.PartialRequest
    ) -> rollout_pb2.PartialReply:
        self.bytes += request.ByteSize()
        if self.error is not None:
            raise self.error
        return rollout_pb2.PartialReply()


@pytest.mark.parametrize("error", [RequestRefused("FAILED_PRECONDITION", "fenced"), None])
async def test_a_controller_that_keeps_nothing_is_not_sent_everything_each_time(
    error: Exception | None,
) -> None:
    session = RefusingSession(error)
    task = LongTask(session)
    await task.run()
    payload = partial_group(common_pb2.TaskRef(task_id="t0"), PROMPT, [task.begin(task.tokens)])
    assert session.bytes <= 1.2 * payload.ByteSize()


async def test_a_full_store_that_has_room_again_gets_all_that_it_lacks() -> None:
    session = CountingSession(room=lambda report: report > 1)
    task = LongTask(session)
    await task.run(until=64 * 8)
    assert session.reports == 2
    assert session.held == 64 * 8
    await task.run(until=64 * 16)
    assert session.held == 64 * 16, "reported every 64 tokens again"


async def test_a_worker_that_leaves_reports_what_a_full_store_had_refused() -> None:
    session = CountingSession(room=lambda report: report > 1)
    task = LongTask(session)
    await task.run(until=64 * 4)
    assert session.held == 0
    await task.reporter.flush_all()
    assert session.held == 64 * 4
