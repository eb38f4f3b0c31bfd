"""Protocol-only workers: real sessions and real requests, made-up tokens.

Used by the control-plane benchmarks and by the controller's tests. They compute nothing, so what is
measured is the controller.

    rollout:  lease ──► (tokens out of thin air) ──► payload stored ──► meta submitted ──► lease ...
    policy:   directive ──► plan ──► vote ──► checkpoint when wanted
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.config.schema import Config
from paceline.ids import ANY, TaskId
from paceline.payloads.group_limits import GroupLimits
from paceline.payloads.group_payload import check_group, encode, payload_digest
from paceline.payloads.open_store import open_payloads
from paceline.payloads.store import PayloadStore, Ref, StoreUnavailable
from paceline.rpc.client import ControlPlane, RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, policy_pb2, rollout_pb2, worker_pb2
from policy_worker.rows.payload_reader import read_payloads


@dataclass
class Timings:
    """Seconds of every request, by kind."""

    lease: list[float] = field(default_factory=list)
    submit: list[float] = field(default_factory=list)
    plan: list[float] = field(default_factory=list)
    vote: list[float] = field(default_factory=list)
    groups: int = 0
    steps: int = 0
    refused: int = 0
    errors: int = 0


def make_group(
    task: common_pb2.TaskRef,
    *,
    completions: int,
    tokens: int,
    version: int,
    kind: rollout_pb2.TaskKind = rollout_pb2.TASK_KIND_TRAIN,
) -> rollout_pb2.Group:
    """A valid group of ``completions`` sequences of ``tokens`` tokens each."""
    ids = np.arange(1, tokens + 1, dtype="<i4").tobytes()
    scores = np.full(tokens, -0.5, dtype="<f4").tobytes()
    group = rollout_pb2.Group(task=task, kind=kind, prompt_tokens=ids[:64])
    for number in range(completions):
        group.completions.add(
            tokens=ids,
            logprobs=scores,
            versions=[common_pb2.VersionSpan(version=version, length=tokens)],
            finish_reason=rollout_pb2.FINISH_REASON_STOP,
            reward=float(number % 2),
        )
    return group


def meta_of(group: rollout_pb2.Group) -> rollout_pb2.GroupMeta:
    """Its meta, without the digest of the payload."""
    count = len(group.completions)
    return check_group(group, GroupLimits(count, ANY, eval_samples=count), ANY)


class GroupTemplate:
    """A group without its task, encoded once: making tokens is not what is measured."""

    def __init__(self, group: rollout_pb2.Group) -> None:
        self._meta = meta_of(group)
        self._stored = group.kind == rollout_pb2.TASK_KIND_TRAIN
        rest = rollout_pb2.Group()
        rest.CopyFrom(group)
        rest.ClearField("task")
        self._rest = encode(rest)

    def of(self, task: common_pb2.TaskRef) -> tuple[rollout_pb2.GroupMeta, bytes]:
        """Metadata and payload of the group for ``task``. The payload of an evaluation is empty."""
        meta = rollout_pb2.GroupMeta()
        meta.CopyFrom(self._meta)
        meta.task.CopyFrom(task)
        if not self._stored:
            return meta, b""
        # The task is the first field.
        payload = encode(rollout_pb2.Group(task=task)) + self._rest
        meta.digest = payload_digest(payload)
        return meta, payload


class FakeWorker:
    """What both roles have: a control plane, a session, and a truthful report."""

    role = common_pb2.ROLE_UNSPECIFIED

    def __init__(self, config: Config, addresses: list[str], worker_id: str) -> None:
        self.config = config
        self.control = ControlPlane.from_config(config, addresses)
        self.session = WorkerSession(
            self.control, worker_id=worker_id, role=self.role, config=config, report=self.report
        )
        self.session.on_rejoin(self.rejoined)
        self.timings = Timings()
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        self.rejoins = 0
        self.payloads: PayloadStore
        self._running: asyncio.Task[None] | None = None

    def report(self) -> worker_pb2.Report:
        raise NotImplementedError

    def rejoined(self, reply: worker_pb2.RegisterReply) -> None:
        self.rejoins += 1

    async def start(self) -> None:
        """Registers and opens the session."""
        reply = await self.session.register()
        self.payloads = open_payloads(reply.payload_urls, reply.run_id, reply.rendezvous_url)
        self._running = asyncio.create_task(self.session.run())

    async def work(self, stopped: Callable[[], bool]) -> None:
        """Does its part until ``stopped`` or the run has ended."""
        raise NotImplementedError

    async def stop(self, *, goodbye: bool = True) -> None:
        if goodbye:
            self.lifecycle = worker_pb2.LIFECYCLE_STOPPED
            await self.session.close()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            await self.payloads.close()
        await self.control.close()


class FakeRollout(FakeWorker):
    """Serves every version the moment it is announced."""

    role = common_pb2.ROLE_ROLLOUT

    def __init__(
        self,
        config: Config,
        addresses: list[str],
        worker_id: str,
        *,
        tokens: int = 16,
        tasks_a_lease: int = 4,
        groups_a_submit: int = 1,
    ) -> None:
        super().__init__(config, addresses, worker_id)
        self.tokens = tokens
        self.tasks_a_lease = tasks_a_lease
        self.groups_a_submit = groups_a_submit
        self.lease_seq = 0
        self.held: dict[str, common_pb2.TaskRef] = {}
        self.settings = rollout_pb2.TaskSettings()
        """Of the newest lease."""
        self._templates: dict[tuple[int, int], GroupTemplate] = {}

    @property
    def version(self) -> int:
        directive = self.session.directive
        return -1 if directive is None else directive.version

    def report(self) -> worker_pb2.Report:
        return worker_pb2.Report(
            lifecycle=self.lifecycle,
            loaded_version=self.version,
            state_version=-1,
            held_leases=list(self.held.values()),
            activity="load",
        )

    def rejoined(self, reply: worker_pb2.RegisterReply) -> None:
        super().rejoined(reply)
        self.lease_seq = 0
        self.held.clear()

    async def lease(self, wait_s: float = 5.0) -> rollout_pb2.LeaseReply:
        self.lease_seq += 1
        version = self.version
        began = time.perf_counter()
        reply: rollout_pb2.LeaseReply = await self.control.call(
            "RolloutService.LeaseTasks",
            rollout_pb2.LeaseRequest(
                caller=self.session.caller,
                lease_seq=self.lease_seq,
                max_tasks=self.tasks_a_lease,
                wait_s=wait_s,
                loaded_version=version,
            ),
            None,
        )
        if reply.leases:
            self.timings.lease.append(time.perf_counter() - began)
        for lease in reply.leases:
            self.settings = lease.settings
            self.held[lease.task.task_id] = lease.task
        return reply

    def group_for(self, lease: rollout_pb2.Lease) -> rollout_pb2.Group:
        """The group that is generated for ``lease``."""
        return make_group(
            lease.task,
            completions=lease.group_size,
            tokens=self.tokens,
            version=max(0, self.version),
            kind=lease.kind,
        )

    def _encoded(self, lease: rollout_pb2.Lease) -> tuple[rollout_pb2.GroupMeta, bytes]:
        """Metadata and payload of ``group_for``."""
        if type(self).group_for is not FakeRollout.group_for:
            return GroupTemplate(self.group_for(lease)).of(lease.task)
        key = (self.version, lease.kind)
        if key not in self._templates:
            self._templates = {key: GroupTemplate(self.group_for(lease))}
        return self._templates[key].of(lease.task)

    async def submit(self, group: rollout_pb2.Group) -> rollout_pb2.SubmitResult:
        return (await self.submit_request(await self.stored([group])))[0]

    async def stored(self, groups: Sequence[rollout_pb2.Group]) -> rollout_pb2.SubmitRequest:
        """The request that submits ``groups``, whose payloads are stored."""
        return await self._store([GroupTemplate(group).of(group.task) for group in groups])

    async def _store(
        self, encoded: Sequence[tuple[rollout_pb2.GroupMeta, bytes]]
    ) -> rollout_pb2.SubmitRequest:
        meta = [known for known, _ in encoded]
        payloads: dict[Ref, bytes] = {
            (TaskId(known.task.task_id), known.task.attempt): payload
            for known, payload in encoded
            if payload
        }
        while True:
            try:
                await self.payloads.put(payloads)
                return rollout_pb2.SubmitRequest(caller=self.session.caller, groups=meta)
            except StoreUnavailable:
                self.timings.errors += 1
                await asyncio.sleep(0.05)

    async def submit_request(
        self, request: rollout_pb2.SubmitRequest
    ) -> Sequence[rollout_pb2.SubmitResult]:
        reply = await self.control.call("RolloutService.SubmitGroups", request, None)
        for group in request.groups:
            self.held.pop(group.task.task_id, None)
        results: Sequence[rollout_pb2.SubmitResult] = reply.results
        return results

    async def work(self, stopped: Callable[[], bool]) -> None:
        """Leases and submits until ``stopped``."""
        while not stopped():
            try:
                if self.version < 0:
                    await asyncio.sleep(0.01)
                    continue
                reply = await self.lease()
                if reply.empty_reason == rollout_pb2.EMPTY_REASON_STOPPED:
                    return
                for first in range(0, len(reply.leases), self.groups_a_submit):
                    together = reply.leases[first : first + self.groups_a_submit]
                    began = time.perf_counter()
                    request = await self._store([self._encoded(lease) for lease in together])
                    results = await self.submit_request(request)
                    self.timings.submit.append(time.perf_counter() - began)
                    for result in results:
                        accepted = result.verdict == rollout_pb2.VERDICT_ACCEPTED
                        self.timings.groups += accepted
                        self.timings.refused += not accepted
            except RequestRefused:
                # Declared dead meanwhile: the session registers anew.
                self.timings.errors += 1
                self.held.clear()
                await asyncio.sleep(0.05)


class FakePolicy(FakeWorker):
    """One replica. Forms every mesh at once and holds whatever state the directive names."""

    role = common_pb2.ROLE_POLICY

    def __init__(self, config: Config, addresses: list[str], worker_id: str) -> None:
        super().__init__(config, addresses, worker_id)
        self.fetch = False
        """True: it reads the payloads of its shard before it votes, as a trainer does."""
        self.state_version = -1
        self.mesh_epoch = 0
        self.trained: list[tuple[int, tuple[str, ...]]] = []
        """(step, task ids of this replica's shard) of every committed step."""
        self.rates: dict[int, float] = {}
        """Learning rate of each step that it trained, by the plan."""
        self.obsolete: set[str] = set()
        """Paths of checkpoints that the controller asked it to delete."""

    def report(self) -> worker_pb2.Report:
        return worker_pb2.Report(
            lifecycle=self.lifecycle,
            state_version=self.state_version,
            loaded_version=-1,
            mesh_epoch=self.mesh_epoch,
            activity="load",
        )

    def rejoined(self, reply: worker_pb2.RegisterReply) -> None:
        super().rejoined(reply)
        self.mesh_epoch = 0

    async def work(self, stopped: Callable[[], bool]) -> None:
        """Takes part in steps until ``stopped`` or the run has ended."""
        while not stopped():
            directive = self.session.directive
            if directive is not None and directive.lifecycle == worker_pb2.LIFECYCLE_STOPPED:
                return
            try:
                await self._checkpoint(directive)
                if directive is None or not directive.HasField("mesh"):
                    await asyncio.sleep(0.005)
                    continue
                if directive.mesh.epoch != self.mesh_epoch:
                    self.mesh_epoch = directive.mesh.epoch
                    self.state_version = directive.mesh.state_version
                    self.session.poke()
                await self.step()
            except RequestRefused:
                self.timings.errors += 1
                await asyncio.sleep(0.05)

    async def step(self) -> None:
        began = time.perf_counter()
        reply = await self.control.call(
            "PolicyService.NextPlan",
            policy_pb2.PlanRequest(
                caller=self.session.caller,
                mesh_epoch=self.mesh_epoch,
                state_version=self.state_version,
                wait_s=0.5,
            ),
            None,
        )
        if reply.state == policy_pb2.PLAN_STATE_EPOCH_OVER:
            await asyncio.sleep(0.005)
        if reply.state == policy_pb2.PLAN_STATE_FINISHED:
            await asyncio.sleep(0.02)
        if reply.state != policy_pb2.PLAN_STATE_OPEN:
            return
        self.timings.plan.append(time.perf_counter() - began)
        if self.fetch and not await self._read(reply.plan):
            return
        await self.vote(reply.plan)

    async def _read(self, plan: policy_pb2.StepPlan) -> bool:
        """Reports the payloads of the shard that are lost or are not what was accepted."""
        payloads = await read_payloads(self.payloads, [(r.task_id, r.attempt) for r in plan.shard])
        faults: dict[policy_pb2.GroupFault, list[common_pb2.TaskRef]] = {}
        for ref, payload, planned in zip(plan.shard, payloads, plan.groups, strict=True):
            if payload is None:
                faults.setdefault(policy_pb2.GROUP_FAULT_PAYLOAD_LOST, []).append(ref)
            elif payload_digest(payload) != planned.digest:
                faults.setdefault(policy_pb2.GROUP_FAULT_PAYLOAD_INVALID, []).append(ref)
        for fault, groups in faults.items():
            request = policy_pb2.RejectRequest(
                caller=self.session.caller, step=plan.step, groups=groups, fault=fault
            )
            await self.control.call("PolicyService.RejectGroups", request, None)
        return not faults

    def stats(self, plan: policy_pb2.StepPlan) -> dict[str, common_pb2.Stat]:
        return {
            name: common_pb2.Stat(sum=float(plan.total_tokens), weight=plan.total_tokens, max=1.0)
            for name in ("loss", "kl", "entropy", "ratio", "logprob_gap", "grad_norm", "lr")
        }

    async def vote(self, plan: policy_pb2.StepPlan) -> None:
        stats = self.stats(plan)
        outcome = policy_pb2.OUTCOME_PENDING
        while outcome == policy_pb2.OUTCOME_PENDING:
            began = time.perf_counter()
            reply = await self.control.call(
                "PolicyService.Vote",
                policy_pb2.VoteRequest(
                    caller=self.session.caller,
                    step=plan.step,
                    mesh_epoch=plan.mesh_epoch,
                    weights_digest=f"v{plan.version}",
                    stats=stats,
                    wait_s=5.0,
                    term=plan.term,
                ),
                None,
            )
            outcome = reply.outcome
        self.timings.vote.append(time.perf_counter() - began)
        if outcome == policy_pb2.OUTCOME_COMMITTED:
            self.state_version = reply.version
            self.trained.append((plan.step, tuple(ref.task_id for ref in plan.shard)))
            self.rates[plan.step] = plan.lr
            self.timings.steps += 1

    async def _checkpoint(self, directive: worker_pb2.Directive | None) -> None:
        if directive is None or not self.trained or not directive.checkpoint_step:
            return
        step = self.trained[-1][0]
        if step >= directive.checkpoint_step:
            reply = await self.control.call(
                "PolicyService.RecordCheckpoint",
                policy_pb2.CheckpointRequest(
                    caller=self.session.caller,
                    step=step,
                    version=self.state_version,
                    path=f"checkpoints/step-{step}",
                    size_bytes=1,
                    seconds=0.1,
                    weights_digest=f"v{self.state_version}",
                ),
                None,
            )
            self.obsolete.update(reply.obsolete_paths)
