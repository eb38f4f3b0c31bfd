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

from paceline import log as logs
from paceline.auth import AuthError
from paceline.client import ControlPlane, RequestRefused
from paceline.config.schema import Config
from paceline.hosts import own_address
from paceline.log import event
from paceline.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2, worker_pb2
from paceline.weights import StagedWeights
from rollout_worker.appetite import tasks_wanted
from rollout_worker.engine import make_engine
from rollout_worker.engine.base import Aborted, EngineError, SwapFailed, WeightsRefused
from rollout_worker.engine.model import pick_device
from rollout_worker.environments.base import BadEnvironment
from rollout_worker.environments.runner import Environments
from rollout_worker.gauges import Gauges
from rollout_worker.held import Held, HeldTask, Stage
from rollout_worker.lease_loop import LeaseLoop
from rollout_worker.outbox import Outbox
from rollout_worker.partials import Partials
from rollout_worker.producer import Producer, longest_prompt, returned
from rollout_worker.receiver import Receiver
from rollout_worker.rewards.functions import RewardError
from rollout_worker.scoring import Scorer
from rollout_worker.tokenizer import PromptTokenizer, TokenizerError

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""A draining worker finishes what it holds for this long, then hands the rest back."""
CUT_S = 1.0
"""How long a stopping worker takes to leave what it has of unfinished tasks to others."""
PART_S = 2.0
"""How long a stopping worker tries to hand its tasks back."""
LOAD_TRIES = 3
"""So often in a row may loading weights fail, on one link after the other, until the worker ends: its
engine would never follow the trainer."""
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
    """Runs until the controller says STOPPED. Returns the exit status; see ``__main__``."""
    logs.setup(worker_id)
    sys.setswitchinterval(_SWITCH_S)
    worker: RolloutWorker | None = None
    try:
        worker = RolloutWorker(config, controllers, worker_id, tensor_host)
        asyncio.run(worker.run())
    except (TokenizerError, RewardError, BadEnvironment, AuthError, EngineError) as error:
        print(f"rollout_worker: {error}", file=sys.stderr)
        return 2
    except RequestRefused as error:
        print(f"rollout_worker: the controller refused {worker_id}: {error}", file=sys.stderr)
        return 2 if error.bad_input and (worker is None or not worker.admitted) else 1
    except EngineFailed as error:
        print(f"rollout_worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class EngineFailed(Exception):
    """The engine stopped working in the middle of the run."""


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
            Environments(config, self.tokenizer) if config.rollout.environment else None
        )
        self.engine = make_engine(config, self.tokenizer)
        self.scorer = Scorer(config.reward)
        self.control = ControlPlane.from_config(config, controllers)
        self.held = Held()
        self.receiver: Receiver | None = None
        self.lifecycle = worker_pb2.LIFECYCLE_STARTING
        self.leaving = asyncio.Event()
        self.ended = asyncio.Event()
        self.failure: Exception | None = None
        self.admitted = False
        """The controller took this worker's config and token."""
        self.replacing = False
        """What the engine serves was never committed and is being replaced."""
        self.failed_loads = 0
        """In a row."""
        self.parted = asyncio.Event()
        """A task is no longer held."""

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
            await self.part()
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
        await asyncio.gather(self.engine.start(), self.scorer.start())
        self.tokenizer.limit = longest_prompt(self.config, self.engine)
        self.gauges = Gauges(self.engine, self.config.rollout.max_sequences)
        self.engine.sample_over = self.on_sample_over
        if self.environments is not None:
            self.environments.sample_over = self.on_sample_over
            await self.environments.start(self.engine, self.scorer)
        self.producer = Producer(
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
            released=self.on_released,
        )
        self.partials = Partials(
            self.call,
            lambda: self.session.caller,
            self.held,
            max_message_bytes=int(self.config.controller.max_message_mb * 2**20 * 0.95),
        )
        if self.config.rollout.partial_every_tokens:
            self.engine.watch(self.config.rollout.partial_every_tokens, self.partials.note)
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
        self.receiver = Receiver(
            url=reply.rendezvous_url,
            run_id=reply.run_id,
            device=pick_device(self.config.model.device),
            on_weights=self.on_weights,
            on_link_error=self.on_link_error,
            host=self.host,
        )
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING

    def stop(self) -> None:
        """Leave now: hand back and go."""
        self.leaving.set()
        self.ended.set()

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stop()

    async def watch_engine(self) -> None:
        """A worker whose engine has died while nothing was asked of it must not live on."""
        try:
            await self.engine.until_failure()
        except EngineError as error:
            raise EngineFailed(str(error)) from error

    async def drain(self) -> None:
        """Once leaving: finish what is held, within DRAIN_S; then it is over."""
        await self.leaving.wait()
        self.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        self.session.poke()
        event(log, "draining", held=len(self.held))
        try:
            async with asyncio.timeout(DRAIN_S):
                await self.all_released()
        except TimeoutError:
            event(log, "drain takes too long, handing back", held=len(self.held))
        self.ended.set()

    async def all_released(self) -> None:
        while len(self.held):
            self.parted.clear()
            await self.parted.wait()

    async def part(self) -> None:
        """Hands back what is held and says STOPPED."""
        self.lifecycle = worker_pb2.LIFECYCLE_DRAINING
        try:
            async with asyncio.timeout(CUT_S):
                await self.leave_partial_work()
        except TimeoutError:
            event(log, "partial work not left behind", logging.WARNING)
        for task in self.held:
            if task.stage is not Stage.FINISHED:
                self.drop(task)
                self.hand_back(task)
        try:
            async with asyncio.timeout(PART_S):
                await self.all_released()
        except TimeoutError:
            # Its leases expire with it.
            event(log, "left without handing back", logging.WARNING, held=len(self.held))
        self.lifecycle = worker_pb2.LIFECYCLE_STOPPED
        await self.session.close()
        event(log, "stopped")

    async def leave_partial_work(self) -> None:
        """What unfinished tasks have so far is stored before they are handed back."""
        if not self.config.rollout.partial_every_tokens:
            return
        cut = []
        for task in self.held:
            if task.request is None or task.stage is Stage.FINISHED:
                continue
            if task.stage is Stage.SCORING:
                self.partials.note(task.request, task.samples)
            elif task.work is not None:
                cut.append(task.work)
                self.engine.abort(task.request_id)
        if cut:
            await asyncio.wait(cut)
        await self.partials.flush()

    async def close(self) -> None:
        for task in self.held:
            self.drop(task)
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
            if (task := self.held.find(ref)) is not None:
                event(log, "task cancelled", task=ref.task_id, attempt=ref.attempt)
                self.drop(task)
                self.outbox.withdraw(ref)
                self.held.release(ref)
                self.on_released()
        if directive.lifecycle == worker_pb2.LIFECYCLE_STOPPED:
            self.stop()
        elif directive.lifecycle == worker_pb2.LIFECYCLE_DRAINING:
            self.leaving.set()
        self.leasing.wake()

    def rejoin(self, reply: worker_pb2.RegisterReply) -> None:
        """All that was held belongs to others by now."""
        for task in self.held:
            self.drop(task)
            self.held.release(task.lease.task)
        self.outbox.clear()
        self.partials.clear()
        if self.receiver is not None:
            self.receiver.set_link(None)
        self.on_released()

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
            not self.leaving.is_set()
            and directive is not None
            and directive.lifecycle == worker_pb2.LIFECYCLE_RUNNING
            and not directive.paused
            and self.engine.version >= 0
            and not self.replacing
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
        task = self.held.add(lease)
        if task is not None and self.leaving.is_set():
            # The request was on its way when this worker was told to leave.
            self.hand_back(task)
        elif task is not None and self.replacing:
            self.hand_back(task, "weights_withdrawn")
        elif task is not None:
            task.work = self.loop.create_task(self.produce(task))

    async def produce(self, task: HeldTask) -> None:
        try:
            outcome = await self.producer.produce(task)
        except Aborted as cut:
            if task.request is not None:
                self.partials.note(task.request, cut.partial)
            return
        except EngineError as error:
            self.fail(EngineFailed(str(error)))
            return
        except Exception as error:
            # A bug on the way of one task must not become a task that is held for ever.
            log.exception("task failed task=%s", task.request_id)
            outcome = returned(
                task,
                rollout_pb2.RETURN_KIND_FAILED,
                "worker_error",
                f"{type(error).__name__}: {error}",
            )
        task.stage = Stage.FINISHED
        self.outbox.put(outcome)
        self.leasing.wake()

    def hand_back(self, task: HeldTask, reason: str = "worker_leaving") -> None:
        task.stage = Stage.FINISHED
        self.outbox.put(returned(task, rollout_pb2.RETURN_KIND_HAND_BACK, reason))

    def drop(self, task: HeldTask) -> None:
        """Stops work on a task, wherever it is."""
        self.engine.abort(task.request_id)
        if task.work is not None:
            task.work.cancel()

    def on_sample_over(self, request_id: str) -> None:
        """Its slot is free, though the rest of its group may run for long."""
        self.held.sample_over(request_id)
        self.leasing.wake()

    def on_released(self) -> None:
        self.leasing.wake()
        self.parted.set()

    # ---- weights

    def on_weights(self, staged: StagedWeights) -> None:
        """In the receiver's thread: returns once the engine serves them."""
        asyncio.run_coroutine_threadsafe(self.load(staged), self.loop).result()

    async def load(self, staged: StagedWeights) -> None:
        self.replacing = staged.version <= self.engine.version
        if self.replacing:
            self.give_up_unfinished()
        try:
            pause_s = await self.engine.load_weights(staged.version, staged.tensors)
            self.failed_loads = 0
        except SwapFailed as error:
            self.failed_loads += 1
            if self.failed_loads >= LOAD_TRIES and not self.ended.is_set():
                self.fail(EngineFailed(f"weights failed to load {LOAD_TRIES} times: {error}"))
            # The link is replaced and brings them again; until then the old ones serve on.
            raise
        except WeightsRefused as error:
            self.fail(EngineFailed(f"weights {staged.version} do not fit model.path: {error}"))
            raise
        except EngineError as error:
            # Of an engine that is being closed it is to be expected.
            if not self.ended.is_set():
                self.fail(EngineFailed(f"weights {staged.version} not loaded: {error}"))
            raise
        finally:
            self.replacing = False
        event(
            log,
            "weights loaded",
            version=staged.version,
            pause_ms=pause_s * 1e3,
            transfer_ms=staged.seconds * 1e3,
        )
        self.session.poke()
        self.leasing.wake()

    def give_up_unfinished(self) -> None:
        """The weights that made these tokens were never committed: their version names others now."""
        for task in self.held:
            if task.stage is Stage.GENERATING:
                self.drop(task)
                self.hand_back(task, "weights_withdrawn")

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
