"""A controller of one rollout worker, in the test's event loop. The test chooses the instant of
each lease, directive and verdict; requests are recorded."""

import asyncio
import json
import tempfile
from typing import Any

import grpc

from paceline.ids import TaskId
from paceline.payloads.group_payload import decode, payload_digest
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import partial_ref
from paceline.v1 import common_pb2, rollout_pb2, worker_pb2
from tests.fakes.peer import Peer

Key = tuple[str, int]


class RolloutController(Peer):
    """``lifecycle`` and ``cancelled`` go out with the next directive: there is one for each
    report."""

    def __init__(self) -> None:
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        self.cancelled: list[common_pb2.TaskRef] = []
        self.dead: set[int] = set()
        """Incarnations that get REJOIN."""
        self.unknown: set[int] = set()
        """Incarnations whose registration is lost: refused as unknown."""
        self.incarnations: list[int] = []
        self.reports: list[worker_pb2.Report] = []
        self.lease_requests: list[rollout_pb2.LeaseRequest] = []
        self.groups: dict[Key, rollout_pb2.Group] = {}
        """As their payloads have them; of an evaluation, which has none, the task alone."""
        self.meta: dict[Key, rollout_pb2.GroupMeta] = {}
        self._directory = tempfile.TemporaryDirectory()
        self._url = f"file://{self._directory.name}"
        self._payloads = open_payloads([self._url], "test", "")
        self.returns: dict[Key, rollout_pb2.ReturnedTask] = {}
        self.submits = 0
        self.acknowledging = asyncio.Event()
        """Cleared: submissions and returns are recorded, but not answered."""
        self.acknowledging.set()
        self.refusing_submits = False
        """As a controller that does not lead."""
        self.verdict: int | None = None
        """Instead of ACCEPTED."""
        self.too_large: set[str] = set()
        """Tasks whose rows fit into no reply: they are dropped when they are leased."""
        self._to_lease: list[rollout_pb2.Lease] = []
        self._answered: tuple[tuple[int, int], list[rollout_pb2.Lease]] = ((0, 0), [])
        """Incarnation and number of the newest lease request, and its tasks."""
        self._changed = asyncio.Event()
        self._seq = 0

    async def close(self) -> None:
        self.acknowledging.set()
        await super().close()
        self._directory.cleanup()

    # ---- for the test

    def lease(
        self,
        task_id: str,
        *,
        kind: int = rollout_pb2.TASK_KIND_TRAIN,
        **row: Any,
    ) -> Key:
        """Gives this task to the worker as soon as it asks."""
        count = 1 if kind == rollout_pb2.TASK_KIND_EVAL else 2
        row = row or {"prompt": "s21=", "answer": "12"}
        self._to_lease.append(
            rollout_pb2.Lease(
                task=common_pb2.TaskRef(task_id=task_id, attempt=1),
                kind=kind,
                row_json=json.dumps(row),
                seed=7,
                group_size=count,
            )
        )
        self._changed.set()
        return task_id, 1

    async def partial(self, task_id: str) -> rollout_pb2.PartialGroup:
        (blob,) = await self._payloads.get([partial_ref(TaskId(task_id))])
        assert blob is not None
        return rollout_pb2.PartialGroup.FromString(blob)

    @property
    def held(self) -> set[Key]:
        """As the newest report names them."""
        if not self.reports:
            return set()
        return {(ref.task_id, ref.attempt) for ref in self.reports[-1].held_leases}

    # ---- the services

    async def Register(self, request: Any, context: Any) -> worker_pb2.RegisterReply:
        self.incarnations.append(request.caller.incarnation)
        return worker_pb2.RegisterReply(
            run_id="test",
            rendezvous_url="redis://127.0.0.1:1/0",
            heartbeat_s=0.05,
            lease_ttl_s=5.0,
            payload_urls=[self._url],
        )

    async def Session(self, requests: Any, context: Any) -> Any:
        async for report in requests:
            self.reports.append(report)
            self._seq += 1
            dead = report.caller.incarnation in self.dead
            yield worker_pb2.Directive(
                term=1,
                seq=self._seq,
                lifecycle=worker_pb2.LIFECYCLE_REJOIN if dead else self.lifecycle,
                cancelled=self.cancelled,
            )

    async def LeaseTasks(self, request: Any, context: Any) -> rollout_pb2.LeaseReply:
        self.lease_requests.append(request)
        await self._fenced(request, context)
        asked = request.caller.incarnation, request.lease_seq
        if asked == self._answered[0]:
            # The reply was lost, or the call was given up meanwhile.
            return rollout_pb2.LeaseReply(leases=self._answered[1])
        try:
            async with asyncio.timeout(request.wait_s):
                while not self._to_lease:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return rollout_pb2.LeaseReply(empty_reason=rollout_pb2.EMPTY_REASON_STALENESS)
        # An incarnation that was declared dead meanwhile gets nothing.
        await self._fenced(request, context)
        count = request.max_tasks
        leases, self._to_lease = self._to_lease[:count], self._to_lease[count:]
        leases = [lease for lease in leases if lease.task.task_id not in self.too_large]
        self._answered = asked, leases
        return rollout_pb2.LeaseReply(leases=leases)

    async def SubmitGroups(self, request: Any, context: Any) -> rollout_pb2.SubmitReply:
        self.submits += 1
        await self._fenced(request, context)
        if self.refusing_submits:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "nobody leads")
        results = []
        for group in request.groups:
            known = _key(group.task) in self.meta
            self.meta.setdefault(_key(group.task), group)
            self.groups.setdefault(_key(group.task), await self._group_of(group))
            verdict = self.verdict or (
                rollout_pb2.VERDICT_DUPLICATE if known else rollout_pb2.VERDICT_ACCEPTED
            )
            results.append(rollout_pb2.SubmitResult(task=group.task, verdict=verdict))
        await self.acknowledging.wait()
        return rollout_pb2.SubmitReply(results=results)

    async def ReturnTasks(self, request: Any, context: Any) -> rollout_pb2.ReturnReply:
        await self._fenced(request, context)
        self.returns.update({_key(item.task): item for item in request.tasks})
        await self.acknowledging.wait()
        return rollout_pb2.ReturnReply(
            results=[
                rollout_pb2.SubmitResult(task=item.task, verdict=rollout_pb2.VERDICT_ACCEPTED)
                for item in request.tasks
            ]
        )

    async def _group_of(self, meta: rollout_pb2.GroupMeta) -> rollout_pb2.Group:
        if meta.kind == rollout_pb2.TASK_KIND_EVAL:
            return rollout_pb2.Group(task=meta.task, kind=meta.kind)
        (payload,) = await self._payloads.get([(TaskId(meta.task.task_id), meta.task.attempt)])
        assert payload is not None and payload_digest(payload) == meta.digest
        return decode(payload)

    async def _fenced(self, request: Any, context: Any) -> None:
        if request.caller.incarnation in self.unknown:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such worker is registered")
        if request.caller.incarnation in self.dead:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this incarnation is over")


def _key(ref: common_pb2.TaskRef) -> Key:
    return ref.task_id, ref.attempt
