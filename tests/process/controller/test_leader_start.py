"""What a leader owes before it answers anybody, and when it may not answer any more."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from controller.context import ControllerContext
from controller.dataset_rows import DatasetRows
from controller.housekeeping import SYNC_S
from controller.leader import Leader
from controller.ledger import Ledger
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import Command
from controller.ledger.enums import Phase, Role
from controller.ledger.events import WorkerDied
from controller.ledger.specs import WorkerSpec
from controller.runtime import NotLeading, cancel_all
from controller.store.journal import Deposed
from controller.store.ledger_follower import LedgerFollower
from controller.store.stores import redis_stores
from paceline.config.load import load_config
from paceline.ids import TaskId
from paceline.payloads.group_limits import Invalid
from paceline.payloads.store import partial_ref
from paceline.redis.leader_lease import LeaderIdentity
from testbed.fleets.controller_processes import write_config
from testbed.fleets.controllers import until
from testbed.redis.redis_process import throwaway_redis
from tests.fixtures.ledgers import Driven

IDENTITY = LeaderIdentity("c", "c:1", socket.gethostname(), os.getpid(), "nonce")
REGISTER = cmd.register(WorkerSpec("rollout-0", 1, Role.ROLLOUT, "host", 1, "127.0.0.1"))


@pytest.fixture
async def leader(tmp_path: Path) -> AsyncIterator[Leader]:
    """Of the first term of a run, on a Redis of its own; not begun."""
    config = load_config(write_config(tmp_path), [])
    with throwaway_redis(tmp_path) as url:
        stores = redis_stores(config, IDENTITY, url)
        context = ControllerContext(config, tmp_path, IDENTITY, stores)
        term = await stores.election.acquire(0)
        assert term is not None
        replica = await LedgerFollower.load(stores.journal, context.projector)
        yield Leader(context, await DatasetRows.load(config), replica, term)
        await stores.close()


@asynccontextmanager
async def leading(leader: Leader) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(leader.run())
    try:
        async with asyncio.timeout(60):
            yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Deposed):
            await task


async def journalled(leader: Leader) -> list[str]:
    entries = await leader.context.stores.journal.scan("0")
    return [event["type"] for entry in entries for event in entry.events]


async def tidied(leader: Leader) -> None:
    while chores := leader.housekeeping.chores:
        await asyncio.gather(*chores)


async def test_a_command_that_arrives_before_the_term_begins_waits_for_it(leader: Leader) -> None:
    """A worker that registered in the instant between winning and beginning a term was refused."""
    early = asyncio.create_task(leader.execute(REGISTER))
    await asyncio.sleep(0)  # the command is at the door; the term has not begun
    async with leading(leader):
        await early
    assert (await journalled(leader))[:3] == ["RunStarted", "TermBegun", "WorkerRegistered"]


async def test_a_decision_that_fails_halfway_ends_the_term(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it changed is in memory and in no journal: nothing may be decided on it."""
    async with leading(leader) as term:
        await leader.execute(REGISTER)
        before = await journalled(leader)

        def fails_halfway(command: Command, ledger: Ledger, now: float) -> None:
            ledger.emit(WorkerDied("rollout-0", 1, "exit", ""))
            raise OverflowError("in the middle of a decision")

        monkeypatch.setattr(Command, "execute", fails_halfway)
        with pytest.raises(NotLeading):
            await leader.execute(REGISTER)
        with pytest.raises(NotLeading):
            leader.decide(REGISTER)
        with pytest.raises(Deposed, match="halfway"):
            await term
    assert await journalled(leader) == before


async def test_a_decision_of_the_leaders_own_that_fails_halfway_ends_the_term_and_no_more(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that liveness asks for has no caller to be told: it ended the process."""
    async with leading(leader) as term:
        await leader.execute(REGISTER)

        def fails_halfway(command: Command, ledger: Ledger, now: float) -> None:
            raise OverflowError("in the middle of a decision")

        monkeypatch.setattr(Command, "execute", fails_halfway)
        dead = cmd.declare_dead("rollout-0", 1, "lease", "")
        monkeypatch.setattr(leader.liveness, "tick", lambda ledger, now: [dead])
        with pytest.raises(Deposed, match="failed"):
            await term


async def test_a_report_of_a_later_term_ends_this_one_and_the_next_is_higher(
    leader: Leader,
) -> None:
    """Redis may lose the later one with the end of the journal: workers would never follow this
    leader again."""
    seen = leader.term + 10**7  # terms follow the clock: this one is hours ahead of it
    async with leading(leader) as term:
        await leader.execute(REGISTER)
        leader.check_term(leader.term)
        with pytest.raises(Invalid, match="of the future"):
            leader.check_term(leader.term + 10**9)
        assert leader.active
        with pytest.raises(NotLeading, match=f"seen term {seen}"):
            leader.check_term(seen)
        assert not leader.active
        with pytest.raises(Deposed, match=f"seen term {seen}"):
            await term
    await leader.election.release()
    following = await leader.election.acquire(leader.term)
    assert following is not None and following > seen


class HandedInClock:
    """Stands still. Who sleeps is woken by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps: asyncio.Queue[float] = asyncio.Queue()
        self.wake = asyncio.Event()

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.sleeps.put_nowait(seconds)
        await self.wake.wait()

    async def slept_for(self, seconds: float) -> None:
        """Returns once somebody sleeps that long."""
        async with asyncio.timeout(60):
            while await self.sleeps.get() != pytest.approx(seconds):
                pass


@pytest.fixture
def clock(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> HandedInClock:
    """Of the leader and of its housekeeping."""
    made = HandedInClock()
    monkeypatch.setattr(leader.context, "clock", made)
    monkeypatch.setattr(leader.housekeeping, "sleep", made.sleep)
    return made


async def test_payloads_of_groups_that_may_still_be_handed_in_survive_the_sweep(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored by a leader that died before its entry, handed in again while the sweep runs."""
    run = Driven.fleet("p0", "r0")
    tries = {(lease.task_id, lease.attempt) for lease in run.lease("r0", 2).leases}
    kept = {*tries, *(partial_ref(task_id) for task_id, _ in tries)}
    stored = dict.fromkeys([*kept, ("t900", 1), partial_ref(TaskId("t900"))], b"group")
    await leader.context.stores.payloads.put(stored)
    monkeypatch.setattr(leader.housekeeping, "_ledger", run.ledger)
    monkeypatch.setattr(leader.group_commit, "durable", lambda: asyncio.sleep(0))
    await leader.housekeeping.sweep_orphans()
    assert set(await leader.context.stores.payloads.list()) == kept


async def test_the_payload_of_a_group_that_nobody_will_train_is_deleted(
    leader: Leader, clock: HandedInClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker stored it, and then the controller did not accept the metadata."""
    run = Driven.fleet("p0", "r0")
    (lease,) = run.lease("r0", 1).leases
    refs = [(lease.task_id, 1), (lease.task_id, 7), (TaskId("t900"), 1)]
    payloads, housekeeping = leader.context.stores.payloads, leader.housekeeping
    await payloads.put(dict.fromkeys(refs, b"group"))
    monkeypatch.setattr(housekeeping, "_ledger", run.ledger)
    monkeypatch.setattr(leader, "ledger", run.ledger)
    clock.wake.set()
    leader.discard_unneeded(refs)
    await tidied(leader)
    assert await payloads.list() == refs[:1], "the attempt that runs may still be handed in"


async def test_the_sweep_of_a_deposed_leader_deletes_nothing(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor may have accepted groups that it has never heard of."""
    context = leader.context
    await context.stores.payloads.put({("t900", 1): b"a group of the successor's"})
    monkeypatch.setattr(leader.group_commit, "durable", lambda: asyncio.sleep(0))
    await context.stores.election.release()
    successor = LeaderIdentity("d", "d:1", socket.gethostname(), os.getpid(), "other")
    stores = redis_stores(context.config, successor, context.stores.url)
    assert await stores.election.acquire(leader.term) is not None
    await leader.housekeeping.sweep_orphans()
    assert await context.stores.payloads.list() == [("t900", 1)]
    await stores.close()


async def test_the_sweep_leaves_payloads_whose_covering_record_may_still_be_lost(
    leader: Leader, clock: HandedInClock
) -> None:
    """The checkpoint was recorded a moment ago: neither a replica of Redis nor the disk need have
    it."""
    refs = [(TaskId("t0"), 1), (TaskId("t900"), 1)]
    payloads, housekeeping = leader.context.stores.payloads, leader.housekeeping
    await payloads.put(dict.fromkeys(refs, b"group"))
    housekeeping.discard(refs[:1])
    await housekeeping.sweep_orphans()
    assert await payloads.list() == refs[:1], "the orphan of an earlier leader alone is deleted"
    clock.wake.set()
    await tidied(leader)
    assert await payloads.list() == []


async def test_payloads_stay_until_a_replica_of_redis_has_the_record_that_covers_them(
    leader: Leader, clock: HandedInClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a Sentinel a failover may lose the record, and the run needs them again."""
    ref = TaskId("t0"), 1
    payloads, housekeeping = leader.context.stores.payloads, leader.housekeeping
    await payloads.put({ref: b"group"})
    asked, replicated = list[bool](), False
    clock.wake.set()

    async def survives(_: ControllerContext) -> bool:
        await asyncio.sleep(0)
        asked.append(replicated)
        return replicated

    monkeypatch.setattr(ControllerContext, "survives_failover", survives)
    housekeeping.discard([ref])
    await until(lambda: len(asked) > 1 or not housekeeping.chores)
    assert await payloads.list() == [ref]
    replicated = True
    await tidied(leader)
    assert await payloads.list() == []


async def test_the_last_payloads_of_a_run_stay_until_a_power_cut_cannot_take_back_its_end(
    leader: Leader, clock: HandedInClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends, and the leader is stopped before Redis has synced the record of the last
    checkpoint."""
    ref = TaskId("t0"), 1
    payloads, housekeeping = leader.context.stores.payloads, leader.housekeeping
    await payloads.put({ref: b"group"})
    monkeypatch.setattr(leader.ledger.state, "phase", Phase.FINISHED)
    housekeeping.discard([ref])
    clock.now += 0.1
    finishing = asyncio.create_task(housekeeping.finish())
    slept = asyncio.create_task(clock.slept_for(SYNC_S - 0.1))
    await asyncio.wait({finishing, slept}, return_when=asyncio.FIRST_COMPLETED)
    assert await payloads.list() == [ref]
    await slept
    clock.wake.set()
    await finishing
    assert await payloads.list() == []
    await cancel_all(housekeeping.chores)
