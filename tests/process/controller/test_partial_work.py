"""Partial work of running tasks: whose it is, how long it is kept, who gets it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.exceptions import OutOfMemoryError

from controller.errors import NotLeading
from controller.ledger import commands as cmd
from controller.services.validation import check_partial
from controller.store.partial_rollouts import PartialRollouts, fresh_part, whole_group
from controller.store.partial_store import (
    NOTHING,
    FilePartials,
    Kept,
    Partial,
    PartialStore,
    RedisPartials,
)
from controller.store.redis_keys import Keys
from paceline.groups.invalid import Invalid
from paceline.groups.limits import GroupLimits
from paceline.redis.client import connect
from paceline.rpc.client import RequestRefused
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish
from rollout_worker.tasks.task_messages import partial_group
from testbed.fleets.controllers import (
    addresses,
    config_of,
    running_controllers,
    until,
    working_fleet,
)
from testbed.redis.redis_process import throwaway_redis
from testbed.workers.fake_workers import FakeRollout
from tests.fixtures.ledgers import Driven
from tests.fixtures.partial_work import partial, report

LIMITS = GroupLimits(group_size=4, max_sequence_tokens=64)


# -- over the wire
# ----------------------------------------------------------------------------------


async def test_the_next_owner_gets_the_work_of_a_dead_one_across_a_failover(
    tmp_path: Path,
) -> None:
    with running_controllers(tmp_path, 2, train={"max_staleness": 8}) as controllers:
        redis, keys = connect(controllers.redis_url), Keys("load")
        async with working_fleet(controllers, rollouts=0):
            config, targets = config_of(controllers), addresses(controllers)
            first, second = (FakeRollout(config, targets, f"rollout-{i}") for i in (8, 9))
            for worker in (first, second):
                worker.tasks_a_lease = 1
                await worker.start()
                await until(lambda worker=worker: worker.version >= 0)
            (lease,) = (await first.lease()).leases
            assert not lease.HasField("partial")
            task_id = lease.task.task_id
            for tokens in (3, 9):
                (result,) = await report(first, partial(task_id, 1, tokens))
                assert result.verdict == rollout_pb2.VERDICT_ACCEPTED
            (result,) = await report(second, partial(task_id, 1, 12))
            assert result.verdict == rollout_pb2.VERDICT_SUPERSEDED, "somebody else's task"

            controllers.started[0].kill()
            returned = rollout_pb2.ReturnedTask(
                task=lease.task, kind=rollout_pb2.RETURN_KIND_HAND_BACK, reason="worker_leaving"
            )
            await first.control.call(
                "RolloutService.ReturnTasks",
                rollout_pb2.ReturnRequest(caller=first.session.caller, tasks=[returned]),
            )
            (again,) = (await second.lease()).leases
            assert (again.task.task_id, again.task.attempt) == (task_id, 2)
            assert again.partial.completions[0] == partial(tokens=9).completions[0]
            (result,) = await report(first, partial(task_id, 1, 15))
            assert result.verdict == rollout_pb2.VERDICT_SUPERSEDED, "its lease is over"

            assert (await second.submit(second.group_for(again))).message == ""
            await until(lambda: _no_partials(redis, keys))
            for worker in (first, second):
                await worker.stop(goodbye=False)
        await redis.aclose()


async def _no_partials(redis: Any, keys: Any) -> bool:
    return [key async for key in redis.scan_iter(keys.partial("*"))] == []


async def test_reports_that_are_refused_change_nothing(tmp_path: Path) -> None:
    with running_controllers(tmp_path, train={"max_staleness": 8}) as controllers:
        redis, keys = connect(controllers.redis_url), Keys("load")
        async with working_fleet(controllers, rollouts=0):
            worker = FakeRollout(config_of(controllers), addresses(controllers), "rollout-9")
            await worker.start()
            await until(lambda: worker.version >= 0)
            (lease, *_) = (await worker.lease()).leases
            bad = partial(lease.task.task_id)
            bad.completions[0].logprobs = np.full(3, 2.0, "<f4").tobytes()
            results = await report(worker, bad, partial("t999"))
            assert [r.verdict for r in results] == [
                rollout_pb2.VERDICT_INVALID,
                rollout_pb2.VERDICT_SUPERSEDED,
            ]
            stranger = rollout_pb2.PartialRequest(
                caller=common_pb2.Caller(worker_id="rollout-9", incarnation=7),
                groups=[partial(lease.task.task_id)],
            )
            with pytest.raises(RequestRefused, match="FAILED_PRECONDITION"):
                await worker.control.call("RolloutService.ReportPartials", stranger)
            assert await _no_partials(redis, keys)
            await worker.stop(goodbye=False)
        await redis.aclose()


# -- at the door
# ------------------------------------------------------------------------------------


def _shorter(group: rollout_pb2.PartialGroup) -> None:
    group.completions[0].logprobs = group.completions[0].logprobs[:4]


def _uncovered(group: rollout_pb2.PartialGroup) -> None:
    group.completions[0].versions[0].length = 2


def _future(group: rollout_pb2.PartialGroup) -> None:
    group.completions[0].versions[0].version = 1


def _negative(group: rollout_pb2.PartialGroup) -> None:
    group.completions[0].tokens = np.array([1, -2, 3], "<i4").tobytes()


def _fewer(group: rollout_pb2.PartialGroup) -> None:
    del group.completions[0]


def _nothing(group: rollout_pb2.PartialGroup) -> None:
    for completion in group.completions:
        completion.Clear()


def _promptless(group: rollout_pb2.PartialGroup) -> None:
    group.prompt_tokens = b""


def _long(group: rollout_pb2.PartialGroup) -> None:
    group.CopyFrom(partial(tokens=65))


@pytest.mark.parametrize(
    "change", [_shorter, _uncovered, _future, _negative, _fewer, _nothing, _promptless, _long]
)
def test_a_malformed_report_is_refused(change: Callable[[Any], None]) -> None:
    group = partial()
    assert check_partial(group, LIMITS, 0) == 9
    change(group)
    with pytest.raises(Invalid):
        check_partial(group, LIMITS, 0)


# -- the stores
# ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with throwaway_redis(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(params=["redis", "files"])
async def store(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Any:
    """Of a run in term 5."""
    client, keys = connect(url), Keys("r")
    await client.flushdb()
    await client.set(keys.term, "5")

    async def is_term(term: int) -> bool:
        return term == 5

    yield (
        RedisPartials(client, keys) if request.param == "redis" else FilePartials(tmp_path, is_term)
    )
    await client.aclose()


async def kept(store: PartialStore, attempt: int, tokens: int) -> str:
    """What is stored of t0 after this report of it."""
    data = f"{attempt}/{tokens}".encode()
    assert await store.put(5, [Partial("t0", attempt, tokens, data)])
    ((found,),) = await store.get(["t0"])
    return found.decode()


async def test_of_one_try_the_longest_report_is_kept(store: PartialStore) -> None:
    assert await store.get(["t0"]) == [[]]
    assert await kept(store, 1, 32) == "1/32"
    assert await kept(store, 1, 64) == "1/64"
    assert await kept(store, 1, 32) == "1/64", "an overtaken report"
    assert await store.sizes() == {"t0": Kept(1, 64, 4)}
    await store.delete(["t0", "t7"])
    assert await store.get(["t0"]) == [[]] and await store.sizes() == {}


async def test_a_report_of_the_next_try_replaces_that_of_the_one_before(
    store: PartialStore,
) -> None:
    """It went on from what was stored, as far as that could still be used."""
    assert await kept(store, 1, 2000) == "1/2000"
    assert await kept(store, 2, 64) == "2/64"
    assert await kept(store, 1, 2100) == "2/64", "a report that was under way"
    assert await store.sizes() == {"t0": Kept(2, 64, 4)}


_CHUNKS = st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3))


@given(st.lists(_CHUNKS, max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
async def test_leader_and_store_agree_on_what_is_kept(
    store: PartialStore, reports: list[tuple[int, int, int]]
) -> None:
    """Chunks in any order: repeated, late, with gaps, of several attempts."""
    await store.delete(["t0"])
    expected = NOTHING
    for attempt, offset, more in reports:
        chunk = Partial("t0", attempt, offset + more, b"x" * (8 * more), offset)
        expected = chunk.after(expected)
        (held,) = await store.put(5, [chunk]) or ()
        assert (held.attempt, held.tokens, held.size) == (
            expected.attempt,
            expected.tokens,
            expected.size,
        )
        ((*chunks,),) = await store.get(["t0"])
        assert sum(map(len, chunks)) == expected.size == 8 * expected.tokens
        assert (await store.sizes()).get("t0", NOTHING) == expected


async def test_chunks_that_come_twice_late_or_after_a_gap_change_nothing(
    store: PartialStore,
) -> None:
    async def held(attempt: int, offset: int, tokens: int) -> int:
        data = f"{attempt}/{offset}-{tokens} ".encode()
        (kept,) = await store.put(5, [Partial("t0", attempt, tokens, data, offset)]) or ()
        return kept.tokens

    assert await held(1, 0, 10) == 10
    assert await held(1, 10, 20) == 20
    assert await held(1, 10, 20) == 20, "twice"
    assert await held(1, 0, 10) == 20, "late"
    assert await held(1, 30, 40) == 20, "a chunk before it is missing"
    assert await held(1, 20, 40) == 40, "sent again from what is held"
    assert b"".join((await store.get(["t0"]))[0]) == b"1/0-10 1/10-20 1/20-40 "
    assert await held(2, 30, 40) == 40, "the next attempt begins with a whole report"
    assert await held(2, 0, 30) == 30
    assert await store.get(["t0"]) == [[b"2/0-30 "]]


def test_chunks_make_up_the_completions_that_they_were_cut_from() -> None:
    tokens, scores = np.arange(40, dtype=np.int32), np.linspace(-1, 0, 40, dtype=np.float32)

    def begun(count: int) -> Completion:
        spans = ((0, count),) if count <= 10 else ((0, 10), (3, count - 10))
        finish = Finish.STOP if count == 40 else Finish.PARTIAL
        stop = "end" if count == 40 else None
        return Completion(tokens[:count], scores[:count], spans, finish, stop)

    ref, prompt = common_pb2.TaskRef(task_id="t0", attempt=1), tokens[:5]
    reports = [(begun(4), None), (begun(12), begun(7)), (begun(40), begun(25))]
    chunks, held = [], (0, 0)
    for completions in reports:
        chunks.append(partial_group(ref, prompt, completions, held).SerializeToString())
        held = tuple(0 if c is None else len(c.tokens) for c in completions)
    assert whole_group(chunks) == partial_group(ref, prompt, reports[-1])
    assert whole_group(chunks[::2]) is None, "with a gap it is nothing"


async def test_a_deposed_leader_stores_nothing(store: PartialStore) -> None:
    assert await store.put(4, [Partial("t0", 1, 1, b"x")]) is None
    assert await store.get(["t0"]) == [[]]
    work = PartialRollouts(store, Driven().state, term=4, limit_bytes=100)
    with pytest.raises(NotLeading):
        await work.keep([Partial("t0", 1, 1, b"x")])


async def test_a_file_that_was_cut_short_counts_as_none(tmp_path: Path) -> None:
    async def is_term(term: int) -> bool:
        return True

    store = FilePartials(tmp_path, is_term)
    await store.put(5, [Partial("t0", 1, 32, b"0123456789")])
    path = tmp_path / "t0.partial"
    path.write_bytes(path.read_bytes()[:-3])
    assert await store.get(["t0"]) == [[]]
    assert await store.put(5, [Partial("t0", 1, 64, b"more", offset=32)]) == [NOTHING]


# -- one leader's view
# ---------------------------------------------------------------------------------


@pytest.fixture
def run() -> Driven:
    """t0 and t1 are leased to r0."""
    driven = Driven(groups_per_step=2, eval_rows=1, max_token_age=1)
    driven.policy("p0")
    driven.rollout("r0", "r1")
    assert driven.lease("r0", 1).leases[0].task_id == "e0.0"
    driven.lease("r0", 2)
    return driven


async def test_what_does_not_fit_is_not_kept(store: PartialStore, run: Driven) -> None:
    work = PartialRollouts(store, run.state, term=5, limit_bytes=10)
    assert await work.keep([Partial("t0", 1, 1, b"x" * 6), Partial("t1", 1, 1, b"x" * 6)]) == [
        Kept(1, 1),
        NOTHING,
    ]
    assert await work.keep([Partial("t0", 1, 2, b"x" * 3, 1)]) == [Kept(1, 2)], "it is appended"
    assert await work.keep([Partial("t0", 1, 3, b"x" * 2, 2)]) == [Kept(1, 2)], "no room for more"
    assert await store.get(["t1"]) == [[]]
    assert await work.keep([Partial("t0", 2, 1, b"x" * 11)]) == [Kept(1, 2)], "too long by itself"
    assert await work.keep([Partial("t0", 2, 1, b"x" * 10)]) == [Kept(2, 1)], "in its place"


@pytest.mark.parametrize("error", [ConnectionError("away"), OutOfMemoryError("full")])
async def test_what_was_not_stored_takes_up_no_room(
    store: PartialStore, run: Driven, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    work = PartialRollouts(store, run.state, term=5, limit_bytes=10)

    async def fail(term: int, partials: Any) -> None:
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(store, "put", fail)
        with contextlib.suppress(NotLeading):
            assert await work.keep([Partial("t0", 1, 1, b"x" * 10)]) == [NOTHING]
    assert await work.keep([Partial("t1", 1, 1, b"x" * 10)]) == [Kept(1, 1)]
    if isinstance(error, ConnectionError):
        run.submit("r0", cmd.LeasedTask("t0", 1, cmd.Kind.TRAIN, 0, 0, 0))
        assert work.finished(run.last) == ["t0"], "it may be there all the same"


async def test_the_work_that_may_be_used_goes_with_the_next_lease(
    store: PartialStore, run: Driven
) -> None:
    work = PartialRollouts(store, run.state, term=5, limit_bytes=10_000)

    def of(attempt: int, tokens: int, version: int = 0) -> Partial:
        data = partial("t0", attempt, tokens, version).SerializeToString()
        return Partial("t0", attempt, 3 * tokens, data)

    assert await work.keep([of(1, 200)]) == [Kept(1, 600)]
    lease = cmd.LeasedTask("t0", 2, cmd.Kind.TRAIN, 0, 0, 0)
    assert (await work.of([lease], 10_000))["t0"].task.attempt == 1
    assert await work.of([lease], 100) == {}, "no room in the message"
    await store.delete(["t0"])
    # A version that is not on this line: what was made with it may not go on.
    assert await store.put(5, [of(1, 200, version=7)])
    assert await work.of([lease], 10_000) == {}


async def test_partial_work_goes_with_its_task(store: PartialStore, run: Driven) -> None:
    work = PartialRollouts(store, run.state, term=5, limit_bytes=1000)
    await work.keep([Partial(t, 1, 1, b"x") for t in ("t0", "t1", "e0.0")])
    (t0, t1) = (cmd.LeasedTask(f"t{n}", 1, cmd.Kind.TRAIN, 0, 0, 0) for n in (0, 1))
    run.submit("r0", t0)
    await work.delete(work.finished(run.last))
    run.return_task("r0", t1, "drop")
    await work.delete(work.finished(run.last))
    assert set(await store.sizes()) == {"e0.0"}
    run.submit("r0", cmd.LeasedTask("e0.0", 1, cmd.Kind.EVAL, 0, 0, 0))
    await work.delete(work.finished(run.last))
    assert await store.sizes() == {}
    await work.keep([Partial("t0", 1, 1, b"x")])
    assert await store.sizes() == {}, "finished while it was being stored"


async def test_a_new_leader_deletes_what_nobody_needs(store: PartialStore, run: Driven) -> None:
    await store.put(5, [Partial("t0", 1, 1, b"x"), Partial("t9", 1, 1, b"x")])
    work = PartialRollouts(store, run.state, term=5, limit_bytes=10)
    await work.begin()
    assert set(await store.sizes()) == {"t0"}
    assert await work.keep([Partial("t1", 1, 1, b"x" * 10)]) == [NOTHING], "t0 is counted"


def test_samples_too_old_to_be_trained_begin_anew(run: Driven) -> None:
    """Tokens of one step ago are trained: with version 2 committed and no step open, the next step
    is 3."""
    run.return_task("r0", cmd.LeasedTask("t1", 1, cmd.Kind.TRAIN, 0, 0, 0), "hand_back")
    run.submit("r0", cmd.LeasedTask("t0", 1, cmd.Kind.TRAIN, 0, 0, 0))
    run.lease("r1", 1)
    run.fill("r1", 1)
    run.train()
    run.train("r0")
    assert run.state.versions.version == 2
    task = next(t for t in run.state.tasks.records.values() if t.task_id == "t1")
    group = partial(task.task_id, 2, size=2)
    group.completions[1].CopyFrom(partial(version=1).completions[0])
    group = fresh_part(run.state, group)
    assert group is not None
    assert [len(c.tokens) for c in group.completions] == [0, 12]
    assert fresh_part(run.state, partial(task.task_id, 2)) is None
