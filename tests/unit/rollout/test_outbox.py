"""Groups on their way out of a worker: checked, and submitted once each, if late, while the payload
store or the controller fails."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from paceline.ids import ANY
from paceline.payloads.group_limits import GroupLimits
from paceline.payloads.group_payload import EncodedGroup, encode_group, payload_digest
from paceline.payloads.store import Ref, StoreFull, StoreUnavailable
from paceline.process import waits
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.held_tasks import HeldTask, HeldTasks
from rollout_worker.tasks import outbox as outbox_module
from rollout_worker.tasks import task_runner
from rollout_worker.tasks.outbox import Outbox
from rollout_worker.tasks.partial_rollouts import PartialRollouts
from testbed.patience import patient
from testbed.workers.fake_workers import make_group
from tests.fakes.engine import FakeEngine
from tests.fakes.payload_store import ScriptedStore

LIMITS = GroupLimits(group_size=2, max_sequence_tokens=ANY, vocabulary=100, eval_samples=2)


class Session:
    """A controller that accepts what is submitted, if the store has the payload."""

    def __init__(self, store: ScriptedStore) -> None:
        self.caller = common_pb2.Caller(worker_id="rollout-0", incarnation=1)
        self.store = store
        self.requests = 0
        self.submitted: list[rollout_pb2.GroupMeta] = []
        self.returned: list[rollout_pb2.ReturnedTask] = []

    async def call(self, method: str, request: Any) -> rollout_pb2.SubmitReply:
        self.requests += 1
        reply = rollout_pb2.SubmitReply()
        for meta in getattr(request, "groups", ()):
            ref = meta.task.task_id, meta.task.attempt
            if meta.kind == rollout_pb2.TASK_KIND_TRAIN:
                assert payload_digest(self.store.payloads[ref]) == meta.digest
            self.submitted.append(meta)
        self.returned += getattr(request, "tasks", ())
        for item in (*getattr(request, "groups", ()), *getattr(request, "tasks", ())):
            reply.results.add(task=item.task, verdict=rollout_pb2.VERDICT_ACCEPTED)
        return reply


@asynccontextmanager
async def sending(
    store: ScriptedStore, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Outbox, Session, HeldTasks]]:
    monkeypatch.setattr(outbox_module, "_RETRY_S", 0.0)
    session, held = Session(store), HeldTasks()
    box = Outbox(session, held, store)  # type: ignore[arg-type]
    running = asyncio.create_task(box.run())
    try:
        async with asyncio.timeout(patient(10)):
            yield box, session, held
    finally:
        running.cancel()


def group(task_id: str, held: HeldTasks, kind: Any = rollout_pb2.TASK_KIND_TRAIN) -> EncodedGroup:
    task = common_pb2.TaskRef(task_id=task_id, attempt=1)
    held.add(rollout_pb2.Lease(task=task, kind=kind, group_size=2))
    made = make_group(task, completions=2, tokens=5, version=0, kind=kind)
    return encode_group(made, LIMITS, ANY)


@pytest.mark.parametrize("failure", [StoreUnavailable("away"), StoreFull("full")])
async def test_a_store_that_fails_delays_groups_and_fails_no_attempt(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ScriptedStore(failure, failure)
    async with sending(store, monkeypatch) as (box, session, held):
        made = [group(f"t{n}", held) for n in range(3)]
        for each in made:
            box.put(each)
        await held.until(lambda: not len(held))
    assert sorted(meta.task.task_id for meta in session.submitted) == ["t0", "t1", "t2"]
    assert session.returned == []
    assert store.payloads == {(g.meta.task.task_id, 1): g.payload for g in made}


@pytest.mark.parametrize(("at_once", "requests"), [(256, 1), (2, 2)])
async def test_groups_that_finish_shortly_after_each_other_travel_together(
    at_once: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "_BATCH_TASKS", at_once)
    async with sending(ScriptedStore(), monkeypatch) as (box, session, held):
        box.put(group("t0", held))
        await asyncio.sleep(0)
        for number in (1, 2):
            box.put(group(f"t{number}", held))
        await held.until(lambda: not len(held))
    assert sorted(meta.task.task_id for meta in session.submitted) == ["t0", "t1", "t2"]
    assert session.requests == requests


async def test_tasks_are_returned_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ScriptedStore(*[StoreUnavailable("away")] * 1000)
    async with sending(store, monkeypatch) as (box, session, held):
        box.put(group("t0", held))
        task = group("t1", held).meta.task
        box.put(rollout_pb2.ReturnedTask(task=task, reason="reward_error"))
        await held.until(lambda: len(held) == 1)
    assert [each.task.task_id for each in session.returned] == ["t1"]
    assert session.submitted == []


async def test_an_evaluation_leaves_nothing_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ScriptedStore()
    async with sending(store, monkeypatch) as (box, session, held):
        box.put(group("e1.0", held, rollout_pb2.TASK_KIND_EVAL))
        await held.until(lambda: not len(held))
    (meta,) = session.submitted
    assert (meta.digest, list(meta.rewards)) == ("", [0.0, 1.0])
    assert store.payloads == {}


@pytest.mark.parametrize("inline", [0, 1 << 16])
@pytest.mark.parametrize(
    ("reward", "most", "reason", "detail"),
    [
        (float("nan"), 1 << 20, "invalid_group", "sample 1: reward is nan"),
        (0.5, 10, "group_too_large", "the payload store takes 10"),
    ],
)
async def test_a_group_that_cannot_be_submitted_is_returned_and_not_stored(
    reward: float, most: int, reason: str, detail: str, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_runner, "_INLINE_BYTES", inline)
    task = common_pb2.TaskRef(task_id="t0", attempt=1)
    bad = make_group(task, completions=2, tokens=5, version=0)
    bad.completions[1].reward = reward

    async def produce(held: HeldTask) -> rollout_pb2.Group:
        return bad

    store = ScriptedStore(largest=most)
    async with sending(store, monkeypatch) as (box, session, held):
        parts: Any = session, held, FakeEngine(), produce, PartialRollouts(held), LIMITS
        tasks = task_runner.TaskRunner(*parts, pytest.fail, unwanted=str, engine_died=pytest.fail)
        tasks.outbox = box
        tasks.take(rollout_pb2.Lease(task=task, group_size=2))
        await held.until(lambda: not len(held))
    (returned,) = session.returned
    assert returned.reason == reason and detail in returned.detail
    assert store.payloads == {}


async def test_a_group_that_is_withdrawn_while_it_is_stored_is_not_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ScriptedStore()
    async with sending(store, monkeypatch) as (box, session, held):
        put = store.put

        async def and_withdraw(payloads: Mapping[Ref, bytes]) -> None:
            await put(payloads)
            box.withdraw(common_pb2.TaskRef(task_id="t0", attempt=1))

        store.put = and_withdraw  # type: ignore[method-assign]
        for name in ("t0", "t1"):
            box.put(group(name, held))
        await held.until(lambda: len(held) == 1)
    assert [meta.task.task_id for meta in session.submitted] == ["t1"]


async def test_the_wait_for_a_store_that_refuses_at_once_lasts_from_the_first_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt is short: without it nobody would see that the worker waits."""
    store = ScriptedStore(*[StoreFull("the store is full")] * 1000)
    async with sending(store, monkeypatch) as (box, _, held):
        box.put(group("t0", held))
        await store.tried(10)
        since = box._away_since
        assert since is not None
        await store.tried(100)
        assert box._away_since == since
        (seen,) = [w for w in store.waits if w.kind is waits.WaitKind.STORE]
        assert seen.what == "storing payloads (the store is full)"
        assert seen.age_s >= time.monotonic() - since - 1.0
        store.failures.clear()
        await held.until(lambda: not len(held))
        assert box._away_since is None
