"""Finished tasks on their way out: payloads to the store, metadata of groups and returned tasks to
the controller.

    put ──► queue ──► payloads to the store ──► metadata, together ──► verdicts

- Whoever reads of an accepted group finds its payload: the payload is stored before the metadata
  leave.
- A task in the outbox stays held until its verdict is read. An outage of the store or of the
  control plane only delays it, and a group that is submitted twice counts once.
- After any verdict but INVALID the worker has nothing more to do with the task.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from paceline.ids import TaskId
from paceline.payloads.group_payload import EncodedGroup
from paceline.payloads.store import PayloadStore, StoreUnavailable
from paceline.payloads.transfer_limits import SLICE_BYTES, slices
from paceline.process.structured_log import event, first_line
from paceline.process.waits import WaitKind, waiting
from paceline.rpc.client import RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.held_tasks import HeldTasks, request_id_of, returned

logger = logging.getLogger(__name__)

_BATCH_TASKS = 256
_GATHER_S = 0.01
"""Groups that finish so shortly after each other travel together: a request costs the controller,
the journal and the store about the same with one group as with ten."""
_RETRY_S = 0.5
_LATER = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
"""Refusals that pass: the store is full, or no controller leads."""
Outcome = EncodedGroup | rollout_pb2.GroupMeta | rollout_pb2.ReturnedTask
"""A group, one whose payload is in the store, or why there is none."""


@dataclass
class Outbox:
    session: WorkerSession
    held: HeldTasks
    store: PayloadStore | None = None  # Set once it is known, before anything is put in
    _queue: dict[str, Outcome] = field(default_factory=dict)  # By request id
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _away_since: float | None = None
    """Since the store takes no payloads, by time.monotonic(); None: it does."""
    _away_why: str = ""
    submitted: int = 0  # Groups acknowledged, accepted or not

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, outcome: EncodedGroup | rollout_pb2.ReturnedTask) -> None:
        if isinstance(outcome, EncodedGroup):
            task = request_id_of(outcome.meta.task)
        else:
            task, reason = request_id_of(outcome.task), outcome.reason
            event(logger, "task returned", task=task, reason=reason, detail=outcome.detail)
        self._queue[task] = outcome
        self._filled.set()

    def withdraw(self, task: common_pb2.TaskRef) -> None:
        """The task belongs to another worker now."""
        self._queue.pop(request_id_of(task), None)

    def clear(self) -> None:
        """Empties the queue: the incarnation is over, and its groups would be refused."""
        self._queue.clear()
        self._away_since = None

    async def run(self) -> None:
        """Sends for as long as the worker lives."""
        while True:
            await self._filled.wait()
            await asyncio.sleep(_GATHER_S)
            self._filled.clear()
            with waiting(WaitKind.VERDICT, "submitting groups"):
                while self._queue and not await self._send():
                    with self._storing() if self._away_since else nullcontext():
                        await asyncio.sleep(_RETRY_S)
            if self._queue:
                self._filled.set()

    async def _send(self) -> bool:
        """One request of each kind. False if the store or the controller cannot take it now."""
        stored = await self._store()
        caller = self.session.caller
        queued = self._queue.values()
        meta = [item for item in queued if isinstance(item, rollout_pb2.GroupMeta)]
        returns = [item for item in queued if isinstance(item, rollout_pb2.ReturnedTask)]
        del meta[_BATCH_TASKS:], returns[_BATCH_TASKS:]
        try:
            if meta:
                submission = rollout_pb2.SubmitRequest(caller=caller, groups=meta)
                reply = await self.session.call("RolloutService.SubmitGroups", submission)
                self._settle(caller, reply.results)
            if returns:
                giving_back = rollout_pb2.ReturnRequest(caller=caller, tasks=returns)
                reply = await self.session.call("RolloutService.ReturnTasks", giving_back)
                self._settle(caller, reply.results)
        except RequestRefused as refused:
            if refused.code in _LATER:
                event(logger, "submission postponed", logging.WARNING, why=refused.message)
                return False
            if self.session.caller == caller:
                # Fenced: the session will soon receive that this incarnation is over. Any other
                # refusal is this worker's own fault, and sending it again does not help.
                event(logger, "submission refused", logging.ERROR, why=str(refused))
                for task in [*(g.task for g in meta), *(r.task for r in returns)]:
                    self.withdraw(task)
                    self.held.release(task)
        return stored

    async def _store(self) -> bool:
        """Stores the payloads of all queued groups. False if the store cannot take one now."""
        store = self.store
        if store is None:
            return False
        ready = {k: g for k, g in self._queue.items() if isinstance(g, EncodedGroup)}
        if not ready:
            self._away_since = None
        sized = ((item, len(item[1].payload)) for item in ready.items())
        try:
            for part in slices(sized, SLICE_BYTES):
                named = ((group.meta.task, group.payload) for _, group in part if group.payload)
                with self._storing():
                    await store.put({(TaskId(t.task_id), t.attempt): p for t, p in named})
                self._away_since = None
                for key, kept in part:
                    # Meanwhile it may have been withdrawn.
                    if self._queue.get(key) is kept:
                        self._queue[key] = kept.meta
        except StoreUnavailable as error:
            self._away_since = self._away_since or time.monotonic()
            self._away_why = first_line(error)
            event(logger, "payloads not stored", logging.WARNING, groups=len(ready), why=str(error))
            return False
        return True

    def _storing(self) -> AbstractContextManager[None]:
        """Marks the wait for the payload store, from the first attempt that failed."""
        what = f"storing payloads ({self._away_why})" if self._away_since else "storing payloads"
        return waiting(WaitKind.STORE, what, "the payload store", since=self._away_since)

    def _settle(
        self, caller: common_pb2.Caller, results: Sequence[rollout_pb2.SubmitResult]
    ) -> None:
        if self.session.caller != caller:
            return
        for result in results:
            if result.verdict not in (rollout_pb2.VERDICT_ACCEPTED, rollout_pb2.VERDICT_DUPLICATE):
                verdict = rollout_pb2.Verdict.Name(result.verdict)
                task = request_id_of(result.task)
                event(logger, "not accepted", task=task, verdict=verdict, why=result.message)
            item = self._queue.pop(request_id_of(result.task), None)
            is_group = isinstance(item, rollout_pb2.GroupMeta)
            if is_group and result.verdict == rollout_pb2.VERDICT_INVALID:
                self.put(returned(result.task, "invalid_group", result.message))
                continue
            self.submitted += is_group
            self.held.release(result.task)
