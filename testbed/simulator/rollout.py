"""Simulated rollout worker: leases, groups and weights, without an engine."""

import asyncio
from collections.abc import Callable
from random import Random

from controller.services import rollout as rollout_service
from paceline.ids import TaskId
from paceline.payloads.group_limits import GroupLimits
from paceline.payloads.group_payload import encode_group
from paceline.v1 import common_pb2, rollout_pb2, worker_pb2
from testbed.simulator.cluster import Cluster
from testbed.simulator.controller_process import Session
from testbed.simulator.gradient_mesh import Weights
from testbed.simulator.oracles.ledger import Violation
from testbed.simulator.virtual_time import Process, settle
from testbed.simulator.worker import SEND_S, Fenced, SentWeights, SimulatedWorker

BRANCHED = 0.1
"""Share of samples that have a second sequence."""

WAIT_S = 1.0
"""How long a request for tasks may be held."""
PATIENCE_S = 1.5
"""A worker that has waited so long for its answer asks for other tasks instead."""
Acknowledged = Callable[[tuple[int, int], int], None]
"""Takes the link, as its epoch and the incarnation of the receiver, and the version loaded."""


class SimulatedRolloutWorker(SimulatedWorker):
    role = common_pb2.ROLE_ROLLOUT
    PARITY_FAILURES = 0.02
    """Share of swaps after which the parameters differ."""

    def __init__(
        self, cluster: Cluster, name: str, exited: Callable[[SimulatedWorker, int], None]
    ) -> None:
        super().__init__(cluster, name, exited)
        self.running: dict[tuple[str, int], asyncio.Future[str]] = {}
        """Held leases, and what calls them off."""
        self.unnamed: set[tuple[str, int]] = set()
        """Held leases that its reports leave out, as if from a worker that forgot and remembers."""
        self.lease_seq = 0
        self.link_epoch = 0
        """The link that the newest weights came over."""
        self.weights: Weights | None = None
        """The newest that came."""
        self.tree = 0
        """Tree of the link that they came over, or that confirmed them."""
        self.sent = SentWeights()
        """To the workers that receive from this one."""
        self.fenced = False
        self.staged = -1
        """Version that came while it was parked: the engine loads it with the next turn."""

    def held(self) -> list[tuple[str, int]]:
        return [ref for ref in self.running if ref not in self.unnamed]

    def rejoin(self) -> None:
        for off in self.running.values():
            settle(off, "off")
        self.running.clear()
        self.unnamed.clear()
        self.lease_seq = 0
        self.fenced = False

    async def work(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.1, 0.5))
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        self._send_report()
        self.spawn(self._hand_on(self.incarnation))
        while not self.over:
            self.check()
            if self.fenced:
                raise Fenced("a request was fenced")
            await self.take_seat()
            self.loaded_version, self.staged = max(self.loaded_version, self.staged), -1
            free = self.cluster.shape.slots - len(self.running)
            leaving = self.lifecycle == worker_pb2.LIFECYCLE_DRAINING
            unloaded = self.loaded_version < 0 and not self.cluster.shape.spec.recorded
            if free <= 0 or unloaded or leaving:
                await self.news(0.6)
                continue
            await self._lease(free)

    async def _park(self) -> None:
        """Hands back what is unfinished. What is being scored needs no device."""
        unfinished = [ref for ref in self.running if self.rng.random() < 0.7]
        for ref in unfinished:
            settle(self.running.pop(ref), "off")
        request = rollout_pb2.ReturnRequest(caller=self.caller)
        for task_id, attempt in unfinished:
            task = common_pb2.TaskRef(task_id=task_id, attempt=attempt)
            kind = rollout_pb2.RETURN_KIND_HAND_BACK
            request.tasks.add(task=task, kind=kind, reason="parked")
        if unfinished:
            await self.call(rollout_service.return_tasks, request)
        await super()._park()

    async def _lease(self, free: int) -> None:
        self.lease_seq += 1
        request = rollout_pb2.LeaseRequest(
            caller=self.caller,
            lease_seq=self.lease_seq,
            max_tasks=free,
            loaded_version=self.loaded_version,
            wait_s=WAIT_S,
        )
        reply = await self.call(
            rollout_service.lease_tasks, request, wait_s=WAIT_S, patience_s=PATIENCE_S
        )
        if reply is None:  # gives up: what it may have been leased, nobody will ever work at
            return
        for lease in reply.leases:
            off = self.create_future()
            self.running[(lease.task.task_id, lease.task.attempt)] = off
            self.spawn(self._generate(lease, off))
        self.progress += 1
        if not reply.leases:
            await self.news(0.1)

    def directed(self, session: Session, view: worker_pb2.Directive) -> None:
        super().directed(session, view)
        for ref in self.directive.cancelled:
            off = self.running.pop((ref.task_id, ref.attempt), None)
            if off is not None:
                settle(off, "off")

    async def _generate(self, lease: rollout_pb2.Lease, off: asyncio.Future[str]) -> None:
        rng, shape, ref = self.rng, self.cluster.shape, (lease.task.task_id, lease.task.attempt)
        caller, incarnation = self.caller, self.incarnation
        recorded = self.cluster.shape.spec.recorded
        first = 0 if recorded else self.loaded_version
        fate = shape.fates.get(int(lease.task.task_id[1:]), "") if training(lease) else ""
        if fate == "kills" and rng.random() < 0.8:
            await self.within(off, rng.random())
            self.exit(1)
            return
        delay = shape.generate_s(rng)
        if rng.random() < shape.forgetful:
            self.unnamed.add(ref)
            delay += rng.uniform(0.0, 2.0) * shape.lease_ttl_s
        if await self.within(off, delay) == "off" or incarnation != self.incarnation:
            return
        leaving = self.lifecycle == worker_pb2.LIFECYCLE_DRAINING
        back = None
        if fate == "fails":
            back = rollout_pb2.RETURN_KIND_FAILED, "reward_error"
        elif fate == "bad":
            back = rollout_pb2.RETURN_KIND_DROP, "prompt_too_long"
        elif leaving and rng.random() < 0.3:
            back = rollout_pb2.RETURN_KIND_HAND_BACK, "draining"
        try:
            if back is None:
                await self._submit(caller, self._group(lease, first))
            else:
                returned = rollout_pb2.ReturnedTask(task=lease.task, kind=back[0], reason=back[1])
                request = rollout_pb2.ReturnRequest(caller=caller, tasks=[returned])
                await self.call(rollout_service.return_tasks, request)
        except Fenced:
            self.fenced = self.incarnation == incarnation
        if self.incarnation == incarnation:
            self.running.pop(ref, None)

    async def _submit(self, caller: common_pb2.Caller, group: rollout_pb2.Group) -> None:
        samples = sum(not completion.HasField("branch") for completion in group.completions)
        limits = GroupLimits(samples, 1 << 20, eval_samples=samples)
        meta = encode_group(group, limits, max(span.version for span in _spans(group))).meta
        if group.kind == rollout_pb2.TASK_KIND_TRAIN:
            self.cluster.redis.store([(TaskId(group.task.task_id), group.task.attempt)])
        request = rollout_pb2.SubmitRequest(caller=caller, groups=[meta])
        reply = await self.call(rollout_service.submit_groups, request)
        (result,) = reply.results
        # Versions that a lost tail of the journal has taken back are refused, and rightly so.
        if result.verdict == rollout_pb2.VERDICT_INVALID and not self.cluster.oracle.corrupted:
            raise Violation(f"a sound group was refused: {result.message}")

    def _group(self, lease: rollout_pb2.Lease, first: int) -> rollout_pb2.Group:
        """Group that it made for ``lease``, sampled with versions ``first`` to the one that is
        loaded."""
        dull = self.rng.random() < 0.1
        dull |= training(lease) and lease.index in self.cluster.shape.solved_rows
        last = 0 if self.cluster.shape.spec.recorded else self.loaded_version
        group = rollout_pb2.Group(task=lease.task, kind=lease.kind, prompt_tokens=bytes(4 * 8))
        for number in range(lease.group_size):
            tokens = self.rng.randrange(10, 60)
            head = tokens if first == last else tokens // 2
            spans = [(first, head), (last, tokens - head)]
            group.completions.add(
                tokens=bytes(4 * tokens),
                logprobs=bytes(4 * tokens),
                versions=[common_pb2.VersionSpan(version=v, length=n) for v, n in spans if n],
                finish_reason=rollout_pb2.FINISH_REASON_STOP,
                reward=0.5 if dull else float(number % 2),
                answer=str(number % 2),
            )
            if Random(f"{lease.task.task_id} {lease.task.attempt} {number}").random() < BRANCHED:
                own = group.completions[-1]
                branch = rollout_pb2.Branch(of=len(group.completions) - 1, prefix=8 + head)
                group.completions.append(own)
                group.completions[-1].ClearField("reward")
                group.completions[-1].ClearField("answer")
                group.completions[-1].branch.CopyFrom(branch)
                newest = [common_pb2.VersionSpan(version=last, length=tokens)]
                del group.completions[-1].versions[:]
                group.completions[-1].versions.extend(newest)
        return group

    def receive(
        self, link_epoch: int, weights: Weights, sender: Process, acknowledged: Acknowledged
    ) -> None:
        """Weights arrived over a link; loaded and acknowledged if the link is still ours."""
        link = next((link for link in self.directive.links if link.epoch == link_epoch), None)
        if link is None:
            return
        if link_epoch != self.link_epoch:
            self.link_epoch = link_epoch
            if link.reload or self.directive.version < max(self.loaded_version, self.staged):
                self._withdraw()
            self.tree = link.tree
        if weights.version > max(self.loaded_version, self.staged):
            self.cluster.oracle.receives(self.name, link_epoch, weights)
            self.weights = weights
            # A generator of its own: the schedules of known seeds stay as they are.
            lot = Random(f"{self.name} {self.incarnation} {weights.version}").random()
            stages = self.seat and self.parked
            if lot < self.PARITY_FAILURES and not stages:
                # The weights are loaded again at once; no task is generated meanwhile.
                self.parity_failures += 1
                self.loaded_version = -1
                self._send_report()
            if stages:
                self.staged = weights.version
            else:
                self.loaded_version = weights.version
            self.progress += 1
            self._send_report()
        ends, newest = (link_epoch, self.incarnation), max(self.loaded_version, self.staged)
        self.cluster.network.send(self.name, sender, acknowledged, ends, newest)

    async def _hand_on(self, incarnation: int) -> None:
        """With relays: sends what it has to those that receive from it."""
        while self.cluster.shape.spec.relay_fanout and self.incarnation == incarnation:
            if self.weights is not None:
                self.sent.offer(self, self, self.weights, self.tree)
            await asyncio.sleep(SEND_S)

    def _withdraw(self) -> None:
        """The weights were never committed, or are of a replica that was outvoted; nor may the
        tokens that they are sampling now count as those of other weights with their version."""
        self.loaded_version = self.staged = -1
        self.weights = None
        self.sent.forget_after(-1)
        while self.running:
            settle(self.running.popitem()[1], "off")


def _spans(group: rollout_pb2.Group) -> list[common_pb2.VersionSpan]:
    return [span for completion in group.completions for span in completion.versions]


def training(lease: rollout_pb2.Lease) -> bool:
    return lease.kind == rollout_pb2.TASK_KIND_TRAIN
