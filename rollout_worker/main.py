"""A rollout worker: leases in, scored groups out, new weights whenever there are some.

    directive ──► link ──► receiver thread ── staged ──► engine.load_weights (between two tokens)
        │                                                        │ loaded: report it, lease with it
        ▼                                                        ▼
    lease_loop ── lease ──► producer (prompt ─► engine ─► rewards) ── group ──► outbox ──► verdict
        ▲   wants tasks while the engine's sequences plus a little are not all there     │ release
        └────────────────────────────────────────────────────────────────────────────────┘

What ends each wait: a lease request, admissible tasks or newer weights; a producer, its samples and
scores, an abort (task cancelled, incarnation over, leaving) or their time limits; the outbox, the
controller's answer, however long it is away. Finished groups are kept through an outage.

Leaving: DRAINING takes nothing new, finishes what is held or hands it back after a while, says
STOPPED and exits 0. STOPPED hands back at once. REJOIN drops everything held; the engine keeps its
weights.

Threads: this event loop; the engine's; the receiver's. Processes: the scoring pool.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

from paceline.config.schema import Config
from paceline.errors import UserError
from paceline.process import structured_log as logs
from paceline.process.process_exit import ENGINE_LOST
from paceline.process.structured_log import event
from paceline.rpc.addresses import own_address
from paceline.rpc.client import ControlPlane, RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2, worker_pb2
from rollout_worker.engine import make_engine
from rollout_worker.engine.base import EngineError
from rollout_worker.engine.transformers.model import pick_device
from rollout_worker.engine_rates import EngineRates
from rollout_worker.environments.environment_runner import EnvironmentRunner
from rollout_worker.rewards.scoring import Scorer
from rollout_worker.tasks.group_producer import GroupProducer, longest_prompt
from rollout_worker.tasks.held_tasks import HeldTasks, Stage
from rollout_worker.tasks.lease_loop import LeaseLoop
from rollout_worker.tasks.lease_sizing import tasks_wanted
from rollout_worker.tasks.outbox import Outbox
from rollout_worker.tasks.partial_rollouts import PartialReporter
from rollout_worker.tasks.task_runner import TaskRunner
from rollout_worker.tokenizer import PromptTokenizer
from rollout_worker.weight_loading import WeightLoader
from rollout_worker.weight_receiver import WeightReceiver

log = logging.getLogger(__name__)

CUT_S = 1.0
"""How long a stopping worker takes to leave what it has of unfinished tasks to others."""
PART_S = 2.0
"""How long a stopping worker tries to hand its tasks back."""
_SWITCH_S = 0.0005
"""Longest hold of the interpreter by one thread: the engine's many short operations must not wait
for the event loop's longer ones."""


def run(
    config: Config,
    *,
    controllers: Sequence[str],
    worker_id: str,
    tensor_host: str | None = None,
) -> int:
    """Runs until the controller says STOPPED. Returns the exit status. Raises UserError."""
    logs.setup(worker_id)
    sys.setswitchinterval(_SWITCH_S)
    worker: RolloutWorker | None = None
    try:
        worker = RolloutWorker(config, controllers, worker_id, tensor_host)
        asyncio.run(worker.run())
    except RequestRefused as error:
        print(f"rollout_worker: the controller refused {worker_id}: {error}", file=sys.stderr)
        return 2 if error.bad_input and (worker is None or not worker.admitted) else 1
    return 0


class EngineFailed(UserError):
    """The engine stopped working in the middle of the run."""


class EngineLost(EngineFailed):
    """While it generated: one of the prompts may have been the reason."""

    exit_status = ENGINE_LOST


class RolloutWorker:
    def __init__(
        self,
        config: Config,
        controllers: Sequence[str],
        worker_id: str,
        tensor_host: str | None = None,
    ) -> None:
        """Loads the tokenizer; raises TokenizerError, BadEnvironment, AuthError or EngineError."""
        self.config = config
        self.worker_id = worker_id
        self.host = tensor_host or own_address(controllers[0])
        self.tokenizer = PromptTokenizer(config)
        self.environments = (
            EnvironmentRunner(config, self.tokenizer) if config.rollout.environment else None
        )
        self.engine = make_engine(config, self.tokenizer)
        self.scorer = Scorer(config.reward)
        self.control = ControlPlane.from_config(config, controllers)
        self.held = HeldTasks()
        self.receiver: WeightReceiver | None = None
        self.lifecycle = worker_pb2.LIFECYCLE_STARTING
        self.leaving = asyncio.Event()
        self.ended = asyncio.Event()
        self.failure: Exception | None = None
        self.admitted = False
        """The controller took this worker's config and token."""

    # ---- life

    async def run(self) -> None:
        """From start to STOPPED. Raises what makes the worker useless."""
        self.loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stop)
        loops: list[asyncio.Task[None]] = []
        try:
            if not await self.unless_ended(self.prepare()):
                return
            loops = [
                self.guard(self.session.run()),
                self.guard(self.leasing.run()),
                self.guard(self.outbox.run()),
                self.guard(self.partials.run()),
                self.guard(self.drain()),
                self.guard(self.watch_engine()),
            ]
            await self.ended.wait()
            await (self.fall() if isinstance(self.failure, EngineLost) else self.part())
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            await self.close()
        if self.failure is not None:
            raise self.failure

    async def unless_ended(self, coro: Coroutine[Any, Any, None]) -> bool:
        """False where the worker is told to stop first."""
        work = self.loop.create_task(coro)
        ended = self.loop.create_task(self.ended.wait())
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return False
        work.result()
        return True

    async def prepare(self) -> None:
        """Engine and rewards are ready before the fleet hears of this worker."""
        engine = self.loop.create_task(self.engine.start())
        scorer = self.loop.create_task(self.scorer.start())
        try:
            await asyncio.gather(engine, scorer)
        finally:
            # Where one fails, the other must not start processes behind the back of what ends them.
            engine.cancel()
            await asyncio.gather(engine, scorer, return_exceptions=True)
        self.tokenizer.limit = longest_prompt(self.config, self.engine)
        self.gauges = EngineRates(self.engine, self.config.rollout.max_sequences)
        if self.environments is not None:
            await self.environments.start(self.engine, self.scorer)
        self.producer = GroupProducer(
            self.config, self.tokenizer, self.engine, self.scorer, self.environments
        )
        self.session = WorkerSession(
            self.control,
            worker_id=self.worker_id,
            role=common_pb2.ROLE_ROLLOUT,
            config=self.config,
            report=self.report,
            tensor_host=self.host,
        )
        self.session.on_directive(self.converge)
        self.session.on_rejoin(self.rejoin)
        self.outbox = Outbox(
            self.call,
            lambda: self.session.caller,
            self.held,
            max_message_bytes=int(self.config.controller.max_message_mb * 2**20 * 0.95),
            released=lambda: self.work.on_released(),
        )
        self.partials = PartialReporter(
            self.call,
            lambda: self.session.caller,
            self.held,
            max_message_bytes=int(self.config.controller.max_message_mb * 2**20 * 0.95),
        )
        if self.config.rollout.partial_every_tokens:
            self.engine.watch(self.config.rollout.partial_every_tokens, self.partials.note)
        self.work = TaskRunner(
            self.held,
            self.engine,
            self.producer,
            self.outbox,
            self.partials,
            wake=lambda: self.leasing.wake(),
            fail=self.engine_died,
        )
        self.engine.sample_over = self.work.on_sample_over
        if self.environments is not None:
            self.environments.sample_over = self.work.on_sample_over
        self.loading = WeightLoader(
            self.engine,
            withdrawn=lambda: self.work.give_up_unfinished("weights_withdrawn"),
            loaded=self.on_loaded,
            fail=self.engine_failed,
        )
        self.leasing = LeaseLoop(
            self.call,
            caller=lambda: self.session.caller,
            open_for=self.may_lease,
            wanted=self.wanted,
            version=lambda: self.engine.version,
            take=self.take,
        )
        reply = await self.session.register()
        self.admitted = True
        self.receiver = WeightReceiver(
            url=reply.rendezvous_url,
            run_id=reply.run_id,
            device=pick_device(self.config.model.device),
            on_weights=self.loading.on_weights,
            on_link_error=self.on_link_error,
            host=self.host,
        )
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING

    def stop(self) -> None:
        """Leave now: hand back and go."""
        self.leaving.set()
        self.ended.set()

    def engine_failed(self, why: object) -> None:
        # Of an engine that is being closed it is to be expected.
        if not self.ended.is_set():
            self.fail(EngineFailed(str(why)))

    def engine_died(self, why: EngineError) -> None:
        """As it worked, or waited for work. Not told as one's leaving, which is held against no task."""
        if not self.ended.is_set():
            lost = bool(self.work.generating())
            self.failure = EngineLost(str(why)) if lost else EngineFailed(str(why))
            self.ended.set()

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stop()

    async def watch_engine(self) -> None:
        """A worker whose engine has died while nothing was asked of it must not live on."""
        try:
            await self.engine.until_failure()
        except EngineError as error:
            self.engine_died(error)

    async def drain(self) -> None:
        """Once leaving: finish what is held, within fleet.drain_s; then it is over."""
        await self.leaving.wait()
        self.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        self.session.poke()
        event(log, "draining", held=len(self.held))
        try:
            async with asyncio.timeout(self.config.fleet.drain_s):
                await self.work.all_released()
        except TimeoutError:
            event(log, "drain takes too long, handing back", held=len(self.held))
        self.ended.set()

    async def fall(self) -> None:
        """Goes without a word about what the engine died with: to be found dead is the evidence by
        which the ledger tells a prompt that kills engines from those that were only there."""
        with_it = [task.request_id for task in self.work.generating()]
        event(log, "engine died at its work", logging.ERROR, tasks=len(with_it), some=with_it[:8])
        await self.leave_partial_work()
        self.work.hand_back_scoring("worker_leaving")
        try:
            async with asyncio.timeout(PART_S):
                await self.work.all_but_generating_released()
        except TimeoutError:
            event(log, "left without handing back", logging.WARNING, held=len(self.held))

    async def leave_partial_work(self) -> None:
        if self.config.rollout.partial_every_tokens:
            try:
                async with asyncio.timeout(CUT_S):
                    await self.work.leave_partial_work()
            except TimeoutError:
                event(log, "partial work not left behind", logging.WARNING)

    async def part(self) -> None:
        """Hands back what is held and says STOPPED."""
        self.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        await self.leave_partial_work()
        self.work.hand_back_all("worker_leaving")
        try:
            async with asyncio.timeout(PART_S):
                await self.work.all_released()
        except TimeoutError:
            # Its leases expire with it.
            event(log, "left without handing back", logging.WARNING, held=len(self.held))
        self.lifecycle = worker_pb2.LIFECYCLE_STOPPED
        await self.session.close()
        event(log, "stopped")

    async def close(self) -> None:
        for task in self.held:
            self.work.drop(task)
        if self.receiver is not None:
            # In a thread: one that hands weights over waits for this loop.
            await asyncio.to_thread(self.receiver.close)
        if self.environments is not None:
            await self.environments.close()
        await self.engine.close()
        await self.scorer.close()
        await self.control.close()

    def guard(self, coro: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A loop of the worker: if it fails, the worker ends with its error."""
        task = self.loop.create_task(coro)
        task.add_done_callback(self.on_loop_done)
        return task

    def on_loop_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))

    async def call(self, method: str, request: Any) -> Any:
        return await self.control.call(method, request, timeout_s=None)

    # ---- what the controller wants and hears

    def converge(self, directive: worker_pb2.Directive) -> None:
        mine = [link for link in directive.links if link.receiver.worker_id == self.worker_id]
        if self.receiver is not None:
            link = max(mine, key=lambda link: link.epoch, default=None)
            self.receiver.set_link(link, directive.version)
        for ref in directive.cancelled:
            if self.work.cancel(ref):
                event(log, "task cancelled", task=ref.task_id, attempt=ref.attempt)
        if directive.lifecycle == worker_pb2.LIFECYCLE_STOPPED:
            self.stop()
        elif directive.lifecycle == worker_pb2.LIFECYCLE_DRAINING:
            self.leaving.set()
        self.leasing.wake()

    def rejoin(self, reply: worker_pb2.RegisterReply) -> None:
        """All that was held belongs to others by now."""
        self.work.forget_all()
        if self.receiver is not None:
            self.receiver.set_link(None)

    def report(self) -> worker_pb2.Report:
        stats = self.engine.stats()
        generating = stats.running + stats.waiting
        gauges = self.gauges.read()
        gauges["unsent"] = float(len(self.outbox))
        gauges["continued_tokens"] = float(self.producer.continued_tokens)
        gauges["scoring"] = float(self.held.count(Stage.SCORING))
        if self.receiver is not None:
            gauges["transfer_s"] = self.receiver.last_transfer_s
        return worker_pb2.Report(
            lifecycle=self.lifecycle,
            progress=stats.tokens + stats.samples + stats.swaps + self.outbox.submitted,
            # Waiting for rewards or for the controller has limits of its own.
            busy=generating > 0,
            held_leases=self.held.refs(),
            state_version=-1,
            loaded_version=self.engine.version,
            link_epochs=self.receiver.formed_epochs() if self.receiver else [],
            gauges=gauges,
            activity=self.activity(generating),
        )

    def activity(self, generating: int) -> str:
        if self.engine.version < 0:
            return "waiting for weights"
        if generating:
            return f"generating {generating} sequences"
        if len(self.held):
            return f"finishing {len(self.held)} tasks"
        reason = rollout_pb2.EmptyReason.Name(self.leasing.starved)
        why = reason.removeprefix("EMPTY_REASON_").lower()
        return "waiting for tasks" if why == "unspecified" else f"waiting for tasks ({why})"

    # ---- tasks

    def may_lease(self) -> bool:
        directive = self.session.directive
        return (
            not (self.leaving.is_set() or self.ended.is_set())
            and directive is not None
            and directive.lifecycle == worker_pb2.LIFECYCLE_RUNNING
            and not directive.paused
            and self.engine.version >= 0
            and not self.loading.replacing
        )

    def wanted(self, round_trip_s: float) -> int:
        rollout = self.config.rollout
        return tasks_wanted(
            slots=rollout.max_sequences,
            group_size=rollout.group_size,
            generating=self.held.generating(),
            sequences_per_s=self.gauges.sequences_per_s,
            round_trip_s=round_trip_s,
            unsent=len(self.outbox),
        )

    def take(self, lease: rollout_pb2.Lease) -> None:
        # The request may have been on its way when this worker was told to leave.
        going = self.leaving.is_set() or self.ended.is_set()
        unwanted = "worker_leaving" if going else ""
        if self.loading.replacing:
            unwanted = unwanted or "weights_withdrawn"
        self.work.take(lease, unwanted)

    # ---- weights

    def on_loaded(self) -> None:
        self.session.poke()
        self.leasing.wake()

    def on_link_error(self, epoch: int, detail: str) -> None:
        """In the receiver's thread."""
        asyncio.run_coroutine_threadsafe(self.tell_link_error(epoch, detail), self.loop)

    async def tell_link_error(self, epoch: int, detail: str) -> None:
        try:
            await self.call(
                "WorkerService.ReportPeerError",
                worker_pb2.PeerError(
                    caller=self.session.caller, epoch=epoch, is_link=True, detail=detail[:500]
                ),
            )
        except RequestRefused as refused:
            event(log, "link error not taken", why=str(refused))
