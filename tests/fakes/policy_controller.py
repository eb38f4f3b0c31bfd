"""Controller of policy workers in the test's own process: the real ledger, without durability and
without clocks, and steps from a fixed script.

Tests choose the instant of a fault to the message. A lost session is a death; a member that only
hangs is dead once the test calls ``declare_dead``.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from controller.directives import directive_of, wire_values
from controller.ledger import decisions as cmd
from controller.ledger.enums import Lifecycle, Role, VoteOutcome
from controller.ledger.specs import LearningRate, WorkerSpec
from controller.ledger.state.fleet import Worker
from controller.services.policy import plan_of
from controller.services.validation import LIFECYCLE_OF, check_stats
from paceline.config.sections.training import TrainConfig
from paceline.observe.vocabulary import DeathCause
from paceline.payloads.group_limits import GroupLimits
from paceline.payloads.group_payload import encode
from paceline.payloads.redis_payloads import payload_key
from paceline.process.threads import BackgroundLoop
from paceline.redis.client import connect_sync
from paceline.v1 import policy_pb2, rollout_pb2, worker_pb2
from tests.fakes.peer import Peer
from tests.fixtures.group_meta import accepted
from tests.fixtures.ledgers import Driven

OUTCOMES = wire_values(VoteOutcome, policy_pb2.Outcome, "OUTCOME")


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
        # Rendezvous keys are good for one try.
        self.run_id = f"run-{time.monotonic_ns():x}"
        # Of recorded data: the owner of the groups gets no weights.
        self.driven = Driven(
            recorded=True,
            steps=len(steps),
            groups_per_step=len(steps[0]),
            group_size=len(steps[0][0].completions),
            checkpoint_every=train.checkpoint_every,
            lr=LearningRate(train.optimizer.lr),
        )
        self.driven.register("r0")
        self.driven.observe("r0")
        self.submitted = 0
        """Steps whose groups are there."""
        self.pause_after = len(steps)
        self.record_until = len(steps)
        """Checkpoints of later steps are written, and their records are lost."""
        self.written: list[int] = []
        """Steps of checkpoints."""
        self.digests: dict[tuple[int, int], set[str]] = {}
        self.stats: list[set[str]] = []
        self.peer_errors: list[str] = []
        self.deaths: list[str] = []
        self.on_vote: Callable[[str, int], None] = lambda worker_id, step: None
        self.before_reply: Callable[[str, int], None] = lambda worker_id, step: None
        self._reports: dict[tuple[str, int], worker_pb2.Report] = {}
        """Of workers that the first epoch waits for others with."""
        self._seq = 0
        self._background = BackgroundLoop("small-controller")
        self._changed = asyncio.Condition()
        self.address = self._background.run(self.start())

    # -- for the test -------------------------------------------------------------------------

    @property
    def workers(self) -> dict[str, Worker]:
        living = self.driven.state.fleet.living(Role.POLICY)
        return {worker.worker_id: worker for worker in living}

    def holds_state(self, worker_id: str) -> bool:
        """True if that replica has the newest weights."""
        worker = self.workers.get(worker_id)
        return worker is not None and worker.state_version == self.version

    @property
    def step(self) -> int:
        return int(self.driven.state.versions.step)

    @property
    def version(self) -> int:
        return int(self.driven.state.versions.version)

    def wait(self, done: Callable[[], bool], timeout_s: float = 100.0) -> None:
        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(done)

        try:
            self._background.run(wait(), timeout_s)
        except TimeoutError:
            state = self.driven.state
            raise AssertionError(
                f"mesh {state.fleet.mesh} step {self.step} version {self.version} open "
                f"{state.steps.open} errors {self.peer_errors} deaths {self.deaths}"
            ) from None

    def change(self, act: Callable[[], object]) -> None:
        async def change() -> None:
            async with self._changed:
                act()
                self._move()

        self._background.run(change())

    def drain(self, worker_id: str) -> None:
        self.change(lambda: self.driven.do(cmd.drain("drain", worker_id, replace=True)))

    def declare_dead(self, worker_id: str) -> None:
        """As if its lease had expired; its session ends with REJOIN once it reads again."""
        self.change(lambda: self._lost(worker_id, self.workers[worker_id].incarnation))

    def end(self) -> None:
        self._background.run(self.close())
        self._background.close()

    # -- membership -----------------------------------------------------------------------------

    def _move(self) -> None:
        """The groups of the next step come if it may begin."""
        with connect_sync(self.redis_url) as client:
            while self.submitted < min(len(self.steps), self.pause_after, self.step + 1):
                groups = self.steps[self.submitted]
                limits = GroupLimits(len(groups[0].completions), 1 << 40)
                for lease, scripted in zip(
                    self.driven.lease("r0", len(groups)).leases, groups, strict=True
                ):
                    group = rollout_pb2.Group()
                    group.CopyFrom(scripted)
                    group.task.task_id = lease.task_id
                    client.set(payload_key(self.run_id, lease.task_id, 1), encode(group))
                    owner = self.driven.current["r0"]
                    self.driven.do(cmd.accept("r0", owner, accepted(group, limits, 1 << 40)))
                self.submitted += 1
        self._changed.notify_all()

    def _lost(self, worker_id: str, incarnation: int) -> None:
        worker = self.driven.state.fleet.current(worker_id, incarnation)
        if worker is not None and worker.alive and worker.lifecycle is not Lifecycle.STOPPED:
            self.deaths.append(worker_id)
            self.driven.do(cmd.declare_dead(worker_id, incarnation, DeathCause.LEASE))
            self._move()

    async def _decide(self, context: Any, command: cmd.Command[Any]) -> Any:
        """The reply; call this with ``_changed`` held."""
        try:
            reply = self.driven.do(command)
        except cmd.CommandRefused as error:
            await context.abort(grpc.StatusCode[error.code.grpc_status], str(error))
        self._move()
        return reply

    async def Register(self, request, context):
        spec = WorkerSpec(
            *_caller(request),
            role=Role.POLICY,
            host=request.host,
            pid=request.pid,
            tensor_host=request.tensor_host,
            ranks=request.ranks,
            state_version=request.state_version,
        )
        async with self._changed:
            await self._decide(context, cmd.register(spec))
        return worker_pb2.RegisterReply(
            run_id=self.run_id,
            rendezvous_url=self.redis_url,
            heartbeat_s=0.2,
            lease_ttl_s=60.0,
            run_dir=self.run_dir,
            payload_urls=[self.redis_url],
        )

    async def Session(self, requests, context):
        report = await anext(aiter(requests))
        caller = _caller(report)
        reader = asyncio.create_task(self._read(requests, report))
        try:
            while not reader.done():
                self._seq += 1
                directive = directive_of(self.driven.state, *caller, report)
                directive.term, directive.seq = 1, self._seq
                yield directive
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), 0.2)
        finally:
            reader.cancel()
            async with self._changed:
                self._lost(*caller)

    async def _read(self, requests, report):
        while True:
            async with self._changed:
                self._reports[_caller(report)] = report
                ready = [r for r in self._reports.values() if _lifecycle(r) is Lifecycle.RUNNING]
                if self.driven.state.fleet.mesh_epoch or len(ready) >= self.at_start:
                    for newest in self._reports.values():
                        self._observe(newest)
                    self._reports.clear()
                    self._move()
            try:
                report = await anext(aiter(requests))
            except StopAsyncIteration:
                return

    def _observe(self, report) -> None:
        if self.driven.state.fleet.current(*_caller(report)) is not None:
            self.driven.do(
                cmd.observe(*_caller(report), _lifecycle(report), report.state_version, -1)
            )

    async def ReportPeerError(self, request, context):
        self.peer_errors.append(request.caller.worker_id)
        return worker_pb2.PeerErrorReply()

    # -- the step -----------------------------------------------------------------------------

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Waits, holding ``_changed``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait_for(done), seconds)

    async def NextPlan(self, request, context):
        def plan() -> policy_pb2.PlanReply:
            place = request.mesh_epoch, request.state_version
            return plan_of(self.driven.state, *_caller(request), *place)

        async with self._changed:
            await self._until(lambda: plan().state != policy_pb2.PLAN_STATE_WAIT, request.wait_s)
            return plan()

    async def TryGroup(self, request, context):
        command = cmd.try_group(
            *_caller(request), request.step, request.mesh_epoch, request.task_id
        )
        async with self._changed:
            return policy_pb2.TryReply(stands=await self._decide(context, command))

    async def Vote(self, request, context):
        name, digest = request.caller.worker_id, request.weights_digest
        self.digests.setdefault((self.version, request.step), set()).add(digest)
        self.on_vote(name, request.step)
        step = request.step, request.mesh_epoch
        vote = cmd.vote(*_caller(request), *step, digest, check_stats(request.stats))
        async with self._changed:
            before = self.version
            result = await self._decide(context, vote)
            if self.version > before:
                self.stats.append(set(request.stats))
            if result.outcome is VoteOutcome.PENDING:
                fleet = self.driven.state.fleet
                await self._until(
                    lambda: self.version > before or fleet.mesh_epoch != request.mesh_epoch,
                    request.wait_s,
                )
                result = await self._decide(context, vote)
        if result.outcome is VoteOutcome.COMMITTED:
            self.before_reply(name, request.step)
        return policy_pb2.VoteReply(outcome=OUTCOMES[result.outcome], version=result.version)

    async def RecordCheckpoint(self, request, context):
        async with self._changed:
            self.written.append(request.step)
            if request.step <= self.record_until:
                state = request.step, request.version, request.path
                await self._decide(context, cmd.record_checkpoint(*_caller(request), *state))
            self._changed.notify_all()
        return policy_pb2.CheckpointReply()


def _caller(request) -> tuple[str, int]:
    return request.caller.worker_id, request.caller.incarnation


def _lifecycle(report) -> Lifecycle:
    return LIFECYCLE_OF[report.lifecycle]
