"""Fake controller of policy workers: one process, no durability, steps from a fixed script.

Tests choose the instant of a fault to the message. The rules are those of the real controller: a
lost session is a death, a death ends the epoch, survivors keep their groups and get those of the
dead, and nobody applies a step before all members of the epoch have voted for it. Time is no
evidence here: a member that only hangs is dead once the test calls ``declare_dead``.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from paceline.config.sections.training import TrainConfig
from paceline.payloads.redis_payloads import payload_key
from paceline.payloads.store import encode
from paceline.process.threads import BackgroundLoop
from paceline.redis.client import connect_sync
from paceline.v1 import policy_pb2, rollout_pb2, worker_pb2
from tests.fakes.peer import Peer
from tests.fixtures.group_meta import submitted


@dataclass
class FakeMember:
    worker_id: str
    incarnation: int
    state_version: int
    epoch: int = 0
    lifecycle: int = 0


@dataclass
class OpenStep:
    groups: list[rollout_pb2.Group]
    shards: dict[str, list[int]]
    votes: dict[str, str] = field(default_factory=dict)


class SmallController(Peer):
    """``steps``: the groups of step 1, 2, ... ``at_start``: members the first epoch waits for."""

    def __init__(
        self,
        redis_url: str,
        run_dir: str,
        steps: Sequence[list[rollout_pb2.Group]],
        at_start: int,
        train: TrainConfig,
    ) -> None:
        self.redis_url, self.run_dir, self.steps = redis_url, run_dir, steps
        self.at_start = at_start
        self.train = train
        self.run_id = secrets.token_hex(4)  # rendezvous keys are good for one try
        self.workers: dict[str, FakeMember] = {}
        self.members: list[tuple[str, int, bool]] = []
        self.epoch = self.version = self.step = 0
        self.restore = True
        self.source = -1
        self.open: OpenStep | None = None
        self.checkpoint = ("", 0)
        self.pause_after = len(steps)
        self.draining: set[str] = set()
        with connect_sync(redis_url) as client:
            client.mset(
                {
                    payload_key(self.run_id, group.task.task_id, group.task.attempt): encode(group)
                    for groups in steps
                    for group in groups
                }
            )
        self.digests: dict[tuple[int, int], set[str]] = {}
        self.stats: list[dict[str, tuple[float, float]]] = []
        self.peer_errors: list[str] = []
        self.deaths: list[str] = []
        self.on_vote: Callable[[str, int], None] = lambda worker_id, step: None
        self.before_reply: Callable[[str, int], None] = lambda worker_id, step: None
        self._committed: dict[tuple[int, int, int], int] = {}
        self._seq = 0
        self._background = BackgroundLoop("small-controller")
        self._changed = asyncio.Condition()
        self.address = self._background.run(self.start())

    # -- for the test -------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], timeout_s: float = 100.0) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(done)

        try:
            self._background.run(wait(), timeout_s)
        except TimeoutError:
            raise AssertionError(
                f"epoch {self.epoch} step {self.step} version {self.version} members "
                f"{self.members} open {self.open and self.open.votes} errors {self.peer_errors} "
                f"deaths {self.deaths}"
            ) from None

    def change(self, act: Callable[[], None]) -> None:
        async def change() -> None:
            async with self._changed:
                act()
                self._move()

        self._background.run(change())

    def declare_dead(self, worker_id: str) -> None:
        """As if its lease had expired; its session ends with REJOIN once it reads again."""
        self.change(lambda: self._lost(self.workers[worker_id]))

    def end(self) -> None:
        self._background.run(self.close())
        self._background.close()

    # -- membership -----------------------------------------------------------------------------

    def _move(self) -> None:
        """Everything that follows from what has just changed."""
        alive = [w for w in self.workers.values() if w.worker_id not in self.draining]
        ids = {(w.worker_id, w.incarnation) for w in alive}
        current = [(m[0], m[1]) for m in self.members]
        if any(m not in ids for m in current) and self.open:
            self._form([w for w in alive if (w.worker_id, w.incarnation) in current])
        elif (
            self.open is None
            and ids != set(current)
            and (len(ids) >= self.at_start or self.epoch > 0)
        ):
            self._form(alive)
        self._open_step()
        self._changed.notify_all()

    def _form(self, workers: list[FakeMember]) -> None:
        if not workers:
            self.members, self.open, self.epoch = [], None, self.epoch + 1
            return
        holders = [w for w in workers if w.state_version == self.version]
        self.restore = not holders
        if not holders:
            if self.epoch > 0:
                self.version += 1
            self.step = self.checkpoint[1]
        self.epoch += 1
        workers = sorted(workers, key=lambda w: w not in holders)
        self.members = [
            (w.worker_id, w.incarnation, bool(holders) and w not in holders) for w in workers
        ]
        self.source = 0 if holders else -1
        if self.open:
            self.open.votes.clear()
            names = [w.worker_id for w in workers]
            orphans = [i for w, s in self.open.shards.items() if w not in names for i in s]
            self.open.shards = {n: self.open.shards.get(n, []) for n in names}
            for k, i in enumerate(orphans):
                self.open.shards[names[k % len(names)]].append(i)

    def _open_step(self) -> None:
        formed = self.members and all(
            i in self.workers and self.workers[i].epoch == self.epoch for i, _, _ in self.members
        )
        if self.open or not formed or self.step >= min(len(self.steps), self.pause_after):
            return
        names = [i for i, _, _ in self.members]
        groups = self.steps[self.step]
        self.open = OpenStep(
            groups, {n: list(range(k, len(groups), len(names))) for k, n in enumerate(names)}
        )

    def _lost(self, worker: FakeMember) -> None:
        if self.workers.get(worker.worker_id) is worker:
            del self.workers[worker.worker_id]
            self.deaths.append(worker.worker_id)
            self._move()

    async def Register(self, request, context):
        async with self._changed:
            self.workers[request.caller.worker_id] = FakeMember(
                request.caller.worker_id, request.caller.incarnation, request.state_version
            )
            self._move()
        return worker_pb2.RegisterReply(
            run_id=self.run_id,
            rendezvous_url=self.redis_url,
            heartbeat_s=0.2,
            lease_ttl_s=60.0,
            run_dir=self.run_dir,
            payload_urls=[self.redis_url],
        )

    async def Session(self, requests, context):
        first = await anext(aiter(requests))
        worker = self.workers.get(first.caller.worker_id)
        if worker is None or worker.incarnation != first.caller.incarnation:
            yield self._directive(None)
            return
        reader = asyncio.create_task(self._read(requests, worker, first))
        try:
            live = True
            while live and not reader.done():
                live = self.workers.get(worker.worker_id) is worker
                yield self._directive(worker if live else None)
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 0.2)
        finally:
            reader.cancel()
            async with self._changed:
                if worker.lifecycle != worker_pb2.LIFECYCLE_STOPPED:
                    self._lost(worker)

    async def _read(self, requests, worker, report):
        while True:
            async with self._changed:
                said = (report.mesh_epoch, report.state_version, report.lifecycle)
                if said != (worker.epoch, worker.state_version, worker.lifecycle):
                    worker.epoch, worker.state_version, worker.lifecycle = said
                    self._move()
            try:
                report = await anext(aiter(requests))
            except StopAsyncIteration:
                return

    def _directive(self, worker: FakeMember | None) -> worker_pb2.Directive:
        self._seq += 1
        directive = worker_pb2.Directive(term=1, seq=self._seq, version=self.version)
        if worker is None:
            directive.lifecycle = worker_pb2.LIFECYCLE_REJOIN
            return directive
        directive.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        if worker.worker_id in self.draining:
            directive.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        if self.step >= len(self.steps):
            directive.lifecycle = worker_pb2.LIFECYCLE_STOPPED
        if (worker.worker_id, worker.incarnation) in {m[:2] for m in self.members}:
            mesh = directive.mesh
            mesh.epoch, mesh.state_version, mesh.step = self.epoch, self.version, self.step
            mesh.source_rank, mesh.restore = self.source, self.restore
            mesh.checkpoint_path = self.checkpoint[0]
            for worker_id, incarnation, needs_state in self.members:
                mesh.members.add(
                    worker_id=worker_id,
                    incarnation=incarnation,
                    tensor_host="127.0.0.1",
                    needs_state=needs_state,
                )
        return directive

    async def ReportPeerError(self, request, context):
        self.peer_errors.append(request.caller.worker_id)
        return worker_pb2.PeerErrorReply()

    # -- the step -----------------------------------------------------------------------------

    async def _until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Waits, holding ``_changed``; False if ``done`` did not become true in time."""
        try:
            return await asyncio.wait_for(self._changed.wait_for(done), seconds)
        except TimeoutError:
            return False

    async def NextPlan(self, request, context):
        name = request.caller.worker_id
        async with self._changed:
            if not await self._until(
                lambda: request.mesh_epoch != self.epoch or self.open is not None, request.wait_s
            ):
                return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_WAIT)
            if request.mesh_epoch != self.epoch or self.open is None:
                return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_EPOCH_OVER)
            groups = self.open.groups
            plan = policy_pb2.StepPlan(
                step=self.step + 1,
                mesh_epoch=self.epoch,
                version=self.version,
                next_version=self.version + 1,
                shard=[groups[i].task for i in self.open.shards[name]],
                groups=[_planned(groups[i]) for i in self.open.shards[name]],
                total_tokens=sum(len(c.tokens) // 4 for g in groups for c in g.completions),
                total_sequences=sum(len(g.completions) for g in groups),
                total_groups=len(groups),
                **_reward_totals(groups),
                rank=[m[0] for m in self.members].index(name),
                size=len(self.members),
                lr=self.train.optimizer.lr,
                checkpoint=(self.step + 1) % self.train.checkpoint_every == 0,
            )
        return policy_pb2.PlanReply(state=policy_pb2.PLAN_STATE_OPEN, plan=plan)

    async def Vote(self, request, context):
        name = request.caller.worker_id
        key = (request.step, request.mesh_epoch)
        self.digests.setdefault((self.version, request.step), set()).add(request.weights_digest)
        self.on_vote(name, request.step)
        async with self._changed:
            live = self.workers.get(name)
            if live is None or live.incarnation != request.caller.incarnation:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "incarnation is over")
            if key not in self._committed and request.mesh_epoch == self.epoch and self.open:
                self.open.votes[name] = request.weights_digest
                if len(self.open.votes) == len(self.members):
                    self._commit(key, request)
            if not await self._until(
                lambda: key in self._committed or request.mesh_epoch != self.epoch, request.wait_s
            ):
                return policy_pb2.VoteReply(outcome=policy_pb2.OUTCOME_PENDING)
        if key not in self._committed:
            return policy_pb2.VoteReply(outcome=policy_pb2.OUTCOME_RETRY)
        self.before_reply(name, request.step)
        return policy_pb2.VoteReply(
            outcome=policy_pb2.OUTCOME_COMMITTED, version=self._committed[key]
        )

    def _commit(self, key, request) -> None:
        self.version += 1
        self.step += 1
        self.open = None
        self._committed[key] = self.version
        self.stats.append({n: (s.sum, s.weight) for n, s in request.stats.items()})
        for name, _, _ in self.members:
            # Whoever voted computes the same: known to hold the state once it has the reply.
            self.workers[name].state_version = self.version
        self._move()

    async def RecordCheckpoint(self, request, context):
        async with self._changed:
            self.checkpoint = (request.path, request.step)
            self._changed.notify_all()
        return policy_pb2.CheckpointReply()


def _planned(group):
    facts = submitted(group)
    return policy_pb2.PlannedGroup(
        tokens=sum(span.length for span in facts.token_versions),
        sequences=len(facts.lengths),
        digest=facts.digest,
        prompt_tokens=facts.prompt_tokens,
        lengths=facts.lengths,
    )


def _reward_totals(groups):
    rewards = [np.array([c.reward for c in group.completions]) for group in groups]
    everything = np.concatenate(rewards)
    return {
        "total_samples": len(everything),
        "reward_sum": everything.sum(),
        "reward_squares": ((everything - everything.mean()) ** 2).sum(),
        "within_squares": sum(((r - r.mean()) ** 2).sum() for r in rewards),
    }
