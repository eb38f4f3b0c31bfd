"""Partial work of unfinished tasks: what is written, how often, and what the next lease uses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.ids import TaskId
from paceline.payloads.group_limits import Invalid
from paceline.payloads.store import StoreFull, partial_ref
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish, Request, SamplingParams
from rollout_worker.held_tasks import HeldTasks
from rollout_worker.tasks.partial_rollouts import PartialRollouts, partial_group, prefixes_of
from tests.fakes.payload_store import ScriptedStore

PROMPT = np.array([13, 5, 8, 14], np.int32)
TASK = common_pb2.TaskRef(task_id="t0", attempt=2)


class Scene:
    """One held task with one completion."""

    def __init__(self) -> None:
        self.store, self.held = ScriptedStore(), HeldTasks()
        self.partials = PartialRollouts(self.held, self.store)  # type: ignore[arg-type]
        self.lease = rollout_pb2.Lease(task=TASK, group_size=1)
        task = self.held.add(self.lease)
        assert task is not None
        self.request = Request(task.request_id, PROMPT, SamplingParams(1 << 20), 1)
        task.request = self.request

    async def report(self, tokens: int, **options: bool) -> None:
        self.partials.note(self.request, [sample(tokens)], **options)
        await self.partials.flush()

    async def prefixes(self) -> tuple[Completion | None, ...]:
        return await self.partials.prefixes(self.lease, PROMPT, max_tokens=1 << 20, version=3)


def sample(count: int, spans: Any = None, finish: Finish = Finish.PARTIAL) -> Completion:
    logprobs = -np.arange(count, dtype=np.float32)
    spans = tuple(spans or [(3, count)])
    return Completion(np.arange(count, dtype=np.int32), logprobs, spans, finish)


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_all_writes_of_a_long_task_are_at_most_five_times_its_payload(scene: Scene) -> None:
    for tokens in range(64, 32_769, 64):
        await scene.report(tokens)
    payload = partial_group(TASK, PROMPT, [sample(32_768)]).ByteSize()
    assert scene.store.written <= 5 * payload
    (left,) = await scene.prefixes()
    assert left is not None and len(left.tokens) >= 32_768 / 1.25 - 64


async def test_the_last_tokens_are_written_however_few_are_new(scene: Scene) -> None:
    await scene.report(1000)
    await scene.report(1001)
    assert scene.store.writes == 1
    await scene.report(1001, last=True)
    (left,) = await scene.prefixes()
    assert left is not None and len(left.tokens) == 1001


async def test_a_store_that_is_full_costs_nothing_but_the_tokens(scene: Scene) -> None:
    scene.store.failures.append(StoreFull("full"))
    await scene.report(64)
    assert await scene.prefixes() == ()
    await scene.report(128)
    assert len(await scene.prefixes()) == 1


async def test_work_of_a_task_that_is_no_longer_held_is_not_written(scene: Scene) -> None:
    scene.partials.note(scene.request, [sample(64)])
    scene.held.release(TASK)
    await scene.partials.flush()
    await scene.report(128)
    assert scene.store.payloads == {}


# -- prefixes


def through_the_store(
    *samples: Completion | None, prompt: np.ndarray = PROMPT, **limits: int
) -> tuple[Completion | None, ...]:
    group = partial_group(TASK, PROMPT, samples)
    again = rollout_pb2.PartialGroup.FromString(group.SerializeToString())
    fresh = {name: limits.pop(name, 0) for name in ("oldest_fresh", "newest_fresh")}
    lease = rollout_pb2.Lease(task=TASK, group_size=limits.pop("count", len(samples)), **fresh)
    return prefixes_of(again, lease, prompt, **{"max_tokens": 8, "version": 9, **limits})


def test_samples_come_back_as_they_were_left() -> None:
    running, done = sample(2, [(1, 2)]), sample(3, [(1, 1), (2, 2)], Finish.STOP)
    first, second, third = through_the_store(running, done, None)
    for got, put in ((first, running), (second, done)):
        assert got is not None
        np.testing.assert_array_equal(got.tokens, put.tokens)
        np.testing.assert_array_equal(got.logprobs, put.logprobs)
        assert (got.versions, got.finish) == (put.versions, put.finish)
    assert third is None


@pytest.mark.parametrize("finish", [Finish.PARTIAL, Finish.LENGTH])
def test_tokens_newer_than_the_engines_weights_are_generated_again(finish: Finish) -> None:
    (cut,) = through_the_store(sample(3, [(3, 2), (4, 1)], finish), version=3)
    assert cut is not None and cut.versions == ((3, 2),)
    assert (cut.tokens.tolist(), cut.finish) == ([0, 1], Finish.PARTIAL)
    assert through_the_store(sample(3, [(3, 2), (4, 1)], finish), version=2) == ()


def test_tokens_above_a_limit_lowered_since_are_left_out() -> None:
    running = sample(4, [(1, 1), (2, 3)])
    done = replace(sample(3, [(1, 2), (2, 1)], Finish.STOP), stop="x")
    for cut, spans in zip(
        through_the_store(running, done, max_tokens=2), (((1, 1), (2, 1)), ((1, 2),)), strict=True
    ):
        assert cut is not None
        assert (cut.tokens.tolist(), cut.versions) == ([0, 1], spans)
        assert (len(cut.logprobs), cut.finish, cut.stop) == (2, Finish.LENGTH, None)
    (short,) = through_the_store(sample(1, None, Finish.STOP), max_tokens=2)
    assert short is not None and short.finish is Finish.STOP
    (full,) = through_the_store(sample(3), max_tokens=3)
    assert full is not None and full.finish is Finish.LENGTH


def test_a_prefix_is_not_used_behind_another_prompt_or_for_another_number_of_samples() -> None:
    assert through_the_store(sample(2), prompt=PROMPT[::-1].copy()) == ()
    assert through_the_store(sample(2), count=2) == ()


def test_samples_that_would_not_be_trained_begin_again() -> None:
    old, new = sample(2, [(1, 1), (4, 1)]), sample(2, [(4, 2)])
    assert [s is None for s in through_the_store(old, new, oldest_fresh=2)] == [True, False]
    assert [s is None for s in through_the_store(old, new, newest_fresh=4)] == [False, False]
    assert through_the_store(old, new, newest_fresh=5) == ()


def _shorter(completion: rollout_pb2.PartialCompletion) -> None:
    completion.logprobs = completion.logprobs[:4]


def _uncovered(completion: rollout_pb2.PartialCompletion) -> None:
    completion.versions[0].length = 2


def _not_finite(completion: rollout_pb2.PartialCompletion) -> None:
    completion.logprobs = np.full(3, np.nan, "<f4").tobytes()


@pytest.mark.parametrize("change", [_shorter, _uncovered, _not_finite])
async def test_damaged_work_begins_again(scene: Scene, change: Callable[[Any], None]) -> None:
    group = partial_group(TASK, PROMPT, [sample(3)])
    change(group.completions[0])
    with pytest.raises(Invalid):
        prefixes_of(group, scene.lease, PROMPT, max_tokens=8, version=9)
    for blob in (group.SerializeToString(), b"\xff"):
        scene.store.payloads[partial_ref(TaskId("t0"))] = blob
        assert await scene.prefixes() == ()
