"""Tasks of a worker: leased ahead of the engine, worked on, handed over or handed back.

    wake ──► may lease? ──► how many? ──► LeaseTasks (the controller keeps the request open while
      ▲      (directive,    (tasks_wanted)    no task is admissible)
      │       weights)                          │ leases
      │                                         ▼
      │      handed back, if this worker ◄──── take ──► producer (prompt ─► engine ─► rewards)
      │      is not to work on it                         └──► outbox ──► verdict: released
      └── a completion has left the engine, new weights are loaded, a directive came

One request is open at a time. If newer weights are loaded while it waits, it is sent again with the
same sequence number: the ledger gives a number its tasks once, so none can get lost in between.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.errors import RefusalCode, one_line
from paceline.ids import ANY
from paceline.payloads.group_limits import GroupLimits, Invalid
from paceline.payloads.group_payload import EncodedGroup, encode_group
from paceline.process.waits import WaitKind, waiting
from paceline.rpc.client import RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Aborted, Engine, EngineError
from rollout_worker.held_tasks import HeldTask, HeldTasks, Stage, request_id_of, returned
from rollout_worker.tasks.outbox import Outbox
from rollout_worker.tasks.partial_rollouts import PartialRollouts

log = logging.getLogger(__name__)

WAIT_S = 10.0  # Longest time the controller may keep a request open
_AT_ONCE_S = 0.25  # A reply that took longer waited for tasks: it says nothing about the round trip
_OVER = (RefusalCode.FENCED.grpc_status, RefusalCode.UNKNOWN.grpc_status)
"""Refusals of an incarnation that is over, or that Redis lost in a failover."""
_PAUSE_S = 0.05  # Between an immediate reply without tasks and the next request
LEAST_AHEAD_S = 0.05
"""Least time that queued work must last: a lease call, a submit call and some scheduling."""
_INLINE_BYTES = 1 << 16
"""Tokens that are checked and encoded in about a millisecond: a thread would cost more."""

Produce = Callable[[HeldTask], Awaitable[rollout_pb2.Group | rollout_pb2.ReturnedTask]]
"""Makes a lease's group, or says why there is none. Raises Aborted if the request was aborted,
EngineError if the engine has failed."""


@dataclass
class TaskRunner:
    """``tasks_to_lease``: takes the round trip in seconds; 0: none now. ``unwanted``: why this
    worker hands back what it leases; empty: it works on it. ``engine_died``: called if the engine
    fails while it works on a task."""

    session: WorkerSession
    held: HeldTasks
    engine: Engine
    produce: Produce
    partials: PartialRollouts
    limits: GroupLimits
    tasks_to_lease: Callable[[float], int]
    unwanted: Callable[[], str]
    engine_died: Callable[[EngineError], None]
    round_trip_s: float = 0.01  # Moving average over calls that found tasks at once. Seconds.
    empty_reason: rollout_pb2.EmptyReason = rollout_pb2.EMPTY_REASON_UNSPECIFIED
    """Reason for which the newest reply had no tasks; unspecified if there were some."""
    _seq: int = 1

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.session, self.held)

    # ---- leasing

    async def run(self) -> None:
        """Leases for as long as the worker lives."""
        while True:
            self.held.room.clear()
            count = self.tasks_to_lease(self.round_trip_s)
            if count <= 0:
                await self.held.room.wait()
                continue
            caller = self.session.caller
            started = time.monotonic()
            try:
                with waiting(WaitKind.TASKS, "waiting for tasks"):
                    reply = await self._request(caller, count)
            except RequestRefused as refused:
                if self.session.caller == caller and refused.code not in _OVER:
                    raise
                # The session registers the next incarnation.
                await self._nap()
                continue
            if reply is None:
                continue
            self.empty_reason = reply.empty_reason
            if self.session.caller != caller:
                # Tasks of an incarnation that is over belong to other workers by now.
                continue
            if not reply.leases:
                if reply.empty_reason == rollout_pb2.EMPTY_REASON_UNSPECIFIED:
                    # There were some, and the row of each is too large for a message: the same
                    # request would get the same.
                    self._seq += 1
                if time.monotonic() - started < _PAUSE_S:
                    await self._nap()
                continue
            self._seq += 1
            took_s = time.monotonic() - started
            if took_s < _AT_ONCE_S:
                self.round_trip_s += 0.2 * (took_s - self.round_trip_s)
            for lease in reply.leases:
                self.take(lease)

    async def _request(
        self, caller: common_pb2.Caller, count: int
    ) -> rollout_pb2.LeaseReply | None:
        """None if the request has to be sent again."""
        version = self.engine.version
        request = rollout_pb2.LeaseRequest(
            caller=caller,
            lease_seq=self._seq,
            max_tasks=count,
            wait_s=WAIT_S,
            loaded_version=version,
        )
        room = self.held.room
        call: asyncio.Future[rollout_pb2.LeaseReply] = asyncio.ensure_future(
            self.session.call("RolloutService.LeaseTasks", request)
        )
        woken: asyncio.Future[Any] = asyncio.ensure_future(room.wait())
        try:
            while True:
                await asyncio.wait({call, woken}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    return call.result()
                if self.engine.version != version or self.session.caller != caller:
                    return None
                room.clear()
                woken = asyncio.ensure_future(room.wait())
        finally:
            call.cancel()
            woken.cancel()
            await asyncio.gather(call, woken, return_exceptions=True)

    async def _nap(self) -> None:
        # Not wait_for: before Python 3.12 it may swallow a cancellation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await self.held.room.wait()

    # ---- work

    def take(self, lease: rollout_pb2.Lease) -> None:
        task = self.held.add(lease)
        if task is None:
            return
        if why := self.unwanted():
            self._hand_back(task, why)
        else:
            task.work = asyncio.create_task(self._work(task))

    async def _work(self, task: HeldTask) -> None:
        try:
            made = await self.produce(task)
            outcome = await self._encode(made) if isinstance(made, rollout_pb2.Group) else made
        except Aborted as aborted:
            if task.request is not None:
                self.partials.note(task.request, aborted.partial, last=True)
            return
        except EngineError as error:
            self.engine_died(error)
            return
        except BaseException as error:
            working = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and working and working.cancelling():
                raise
            # Otherwise what one task meets, in our code or a user's, would keep it held for ever.
            log.exception("task failed task=%s", task.request_id)
            outcome = returned(task.lease.task, "worker_error", one_line(error))
        task.stage = Stage.FINISHED
        self.outbox.put(outcome)
        self.held.room.set()

    async def _encode(self, group: rollout_pb2.Group) -> EncodedGroup | rollout_pb2.ReturnedTask:
        """The group, or the return of its task if it cannot be submitted: a malformed one is found
        here, before anybody else has anything of it."""
        size = len(group.prompt_tokens) + len(group.prompt_routes)
        size += sum(len(c.tokens) + len(c.routes) for c in group.completions)
        encode = partial(encode_group, group, self.limits, ANY)
        try:
            # In a thread: a large group takes some time, and the session must go on.
            encoded = encode() if size <= _INLINE_BYTES else await asyncio.to_thread(encode)
        except Invalid as error:
            return returned(group.task, "invalid_group", str(error))
        store = self.outbox.store
        if store is not None and len(encoded.payload) > store.largest:
            detail = f"{len(encoded.payload)} bytes, the payload store takes {store.largest}"
            return returned(group.task, "group_too_large", detail)
        return encoded

    def _hand_back(self, task: HeldTask, reason: str) -> None:
        task.stage = Stage.FINISHED
        kind = rollout_pb2.RETURN_KIND_HAND_BACK
        self.outbox.put(returned(task.lease.task, reason, kind=kind))

    def drop(self, task: HeldTask) -> None:
        self.engine.abort(task.request_id)
        if task.work is not None:
            task.work.cancel()

    def cancel(self, ref: common_pb2.TaskRef) -> bool:
        """The controller has taken the task away. False if it is not held."""
        if (task := self.held.find(request_id_of(ref))) is None:
            return False
        self.drop(task)
        self.outbox.withdraw(ref)
        self.held.release(ref)
        return True

    def drop_all(self) -> None:
        """Drops everything: the incarnation is over, and its tasks belong to others by now."""
        for task in self.held:
            self.drop(task)
            self.held.release(task.lease.task)
        self.outbox.clear()
        self.partials.clear()

    def hand_back(self, reason: str, *stages: Stage) -> None:
        """Stops and hands back the tasks in these stages."""
        for task in self.held.in_stage(*stages):
            self.drop(task)
            self._hand_back(task, reason)

    async def leave_partial_work(self, *stages: Stage) -> None:
        """Stores the unfinished completions of tasks in these stages, for the workers that get them
        next."""
        aborted = []
        for task in self.held.in_stage(*stages):
            if task.request is None:
                continue
            if task.stage is Stage.SCORING:
                self.partials.note(task.request, task.completions, last=True)
            elif task.work is not None:
                aborted.append(task.work)
                self.engine.abort(task.request_id)
        if aborted:
            await asyncio.wait(aborted)
        await self.partials.flush()


def tasks_wanted(
    *,
    slots: int,
    group_size: int,
    generating: int,
    sequences_per_s: float,
    round_trip_s: float,
    unsent: int,
) -> int:
    """Tasks to ask for; 0: enough is at hand. ``generating``: unfinished sequences;
    ``sequences_per_s``: measured, 0 while unknown; ``round_trip_s``: of a lease call that found
    tasks; ``unsent``: groups the controller has not taken yet. Besides the slots, work for two
    round trips is queued. A small shortfall of the queue may grow, because one call for several
    tasks costs as much as one for one; a free slot is filled."""
    ahead_s = max(2 * round_trip_s, LEAST_AHEAD_S)
    ahead = min(max(slots // 8, math.ceil(sequences_per_s * ahead_s)), slots)
    target = slots + ahead
    if unsent * group_size > 2 * target:
        # The controller takes no groups: more work would only pile up.
        return 0
    short = target - generating
    if short <= 0 or (generating >= slots and short < max(group_size, ahead // 2)):
        return 0
    return min(math.ceil(short / group_size), 256)
