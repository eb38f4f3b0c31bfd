"""Rollout worker: leases, scored groups and weight updates.

    directive ──► link ──► receiver thread ── staged ──► engine.load_weights (between two tokens)
        │                                                        │ loaded: reported, leased with
        ▼                                                        ▼
    lease loop ── lease ──► producer (prompt ─► engine ─► rewards) ── group ──► outbox ──► verdict
        ▲   leases more while the engine has room for more sequences                     │ release
        └────────────────────────────────────────────────────────────────────────────────┘

Every lease that this worker reads ends exactly once, as one of:

- submitted: its group is in the outbox, and held until the controller's verdict is read;
- returned: handed back (worker leaves, weights withdrawn), failed, or dropped, with a reason;
- dropped here: the controller has cancelled it or declared this incarnation dead, so that it
  belongs to another worker by now, and a late group of it would be refused;
- left to expire: the worker died, or its engine died with the lease's prompt in it.

What ends each wait: a lease request, admissible tasks or newer weights; a producer, its completions
and scores, an abort (task cancelled, incarnation over, leaving) or their time limits; the outbox,
the controller's answer, however long the controller is away. Finished groups survive its outage.

Leaving: DRAINING takes nothing new, finishes the held tasks or hands them back after a while,
reports STOPPED and exits 0. STOPPED hands back at once. REJOIN drops everything held; the engine
keeps its weights.

Recorded data (rollout.source): a producer tokenises the lease's row. There is no engine, no
receiver, and no scoring; leases, outbox and the rest are the same.

Threads: this event loop; the engine's; the receiver's. Processes: the scoring pool.
"""

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.config.schema import Config
from paceline.dataset.recorded_encoding import RowEncoder
from paceline.ids import ANY
from paceline.payloads.group_limits import GroupLimits
from paceline.payloads.open_store import open_payloads
from paceline.process import structured_log as logs
from paceline.process.compute_device import pick_device
from paceline.process.lifetime import leave_on_signal
from paceline.process.structured_log import event
from paceline.process.threads import all_or_none, end_forks_of, replace_executor
from paceline.process.waits import WaitKind, loading_model, waiting
from paceline.prompt_tokenizer import PromptTokenizer
from paceline.rpc.addresses import own_address
from paceline.rpc.client import ControlPlane, RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, worker_pb2
from paceline.weights.weight_store import WeightStore
from paceline.worker_pools import seat_of
from rollout_worker.engine.base import EngineError
from rollout_worker.engine.choice import make_engine
from rollout_worker.engine.without_model import NoEngine
from rollout_worker.held_tasks import HeldTasks
from rollout_worker.lifecycle import WorkerLifecycle
from rollout_worker.rewards.scoring import Scorer
from rollout_worker.store_receiver import StoreReceiver
from rollout_worker.tasks.environment_runner import EnvironmentRunner
from rollout_worker.tasks.group_producer import GroupProducer, RecordedProducer
from rollout_worker.tasks.group_scores import GroupScores
from rollout_worker.tasks.partial_rollouts import PartialRollouts
from rollout_worker.tasks.task_runner import Produce, TaskRunner, tasks_wanted
from rollout_worker.turns import DEVICE_TAKEN, Turns
from rollout_worker.weight_loading import WeightLoader
from rollout_worker.weight_receiver import WeightReceiver
from rollout_worker.worker_report import RolloutReport

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005
"""Longest time one thread keeps the interpreter: the engine's many short operations must not wait
for the event loop's longer ones."""


def run(config: Config, options: argparse.Namespace) -> int:
    """Runs until the controller says STOPPED. Returns the exit status. Raises UserError."""
    place = options.controllers, options.id
    logs.setup(options.id)
    sys.setswitchinterval(_SWITCH_S)
    with loading_model(config.model.path):
        worker = RolloutWorker(config, *place, options.tensor_host, options.run_dir)
    asyncio.run(worker.run())
    return 0


class RolloutWorker:
    def __init__(
        self,
        config: Config,
        controllers: Sequence[str],
        worker_id: str,
        tensor_host: str | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """Loads the tokenizer; raises TokenizerError, BadEnvironment, AuthError or EngineError."""
        self.config = config
        self.worker_id = worker_id
        self.host = tensor_host or own_address(controllers[0])
        self.tokenizer = PromptTokenizer(config)
        named = config.rollout.environment is not None
        endpoint = None if run_dir is None else run_dir / "endpoints" / worker_id
        self.environments = EnvironmentRunner(config, self.tokenizer, endpoint) if named else None
        self.engine = make_engine(config, self.tokenizer)
        self.scorer = Scorer(config.reward)
        self.set_scorers = {
            name: Scorer(config.reward.model_copy(update={"functions": each.reward}))
            for name, each in config.evaluation.sets.items()
            if each.reward is not None
        }
        self.group_scores: GroupScores | None = None
        self._run_dir = run_dir
        self.control = ControlPlane.from_config(config, controllers, run_dir)
        self.held = HeldTasks()
        self.lifecycle = WorkerLifecycle(self.held, config.fleet.drain_s)
        self.receiver: WeightReceiver | None = None
        self.turns: Turns | None = None  # None: the device is this worker's alone
        self.admitted = False  # The controller has accepted this worker's config and token

    async def run(self) -> None:
        """From start to STOPPED. Raises the failure that made the worker useless."""
        self.loop = asyncio.get_running_loop()
        end_forks_of(self.loop)
        leave_on_signal(self.lifecycle.stop, self.config.fleet.drain_s, self.loop)
        working = self.loop.create_task(self.work())
        try:
            await self.lifecycle.ended.wait()
            if self.admitted:
                await self.lifecycle.leave(self.session, self.tasks)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await self.close()
            replace_executor(self.loop)  # Its end is not to wait for threads of users
        if self.lifecycle.failure is not None:
            raise self.lifecycle.failure

    async def work(self) -> None:
        """Until it is cancelled. A failure ends the worker."""
        try:
            await self.prepare()
        except Exception as error:
            self.lifecycle.fail(error)
            return
        turns = self.turns
        engine = (
            [self.engine.until_failure()] if turns is None else [turns.until_failure(), turns.run()]
        )
        loops = (
            self.session.run(),
            self.tasks.run(),
            self.tasks.outbox.run(),
            self.tasks.partials.run(),
            self.lifecycle.drain(self.session),
            *engine,
        )
        await asyncio.gather(*map(self.guard, loops))

    async def prepare(self) -> None:
        """Starts engine and rewards before the fleet learns of this worker. With turns the engine
        starts at the first of them."""
        if self.config.takes_turns:
            await self._start_scorer()
        else:
            await self.start_engine_and_scorer()
        self.connect_parts()
        with waiting(WaitKind.CONTROLLER, "registering"):
            reply = await self.session.register()
        self.admitted = True
        store = open_payloads(reply.payload_urls, reply.run_id, reply.rendezvous_url)
        self.tasks.outbox.store = self.tasks.partials.store = store
        self.lifecycle.state = worker_pb2.LIFECYCLE_RUNNING
        if self.config.recorded:
            return
        # The ranks of vLLM share what arrived through host memory, and its device has no room for
        # it. Between its turns a worker has no device.
        on_host = self.config.takes_turns or self.config.rollout.engine == "vllm"
        receiver: Callable[..., WeightReceiver] = WeightReceiver
        if (url := self.config.weights.url) is not None:
            receiver = partial(StoreReceiver, WeightStore(url, reply.run_id))
        self.receiver = self.reports.receiver = receiver(
            url=reply.rendezvous_url,
            run_id=reply.run_id,
            device=pick_device("cpu" if on_host else self.config.model.device),
            on_weights=self.loading.on_weights,
            evaluating=self.held.evaluating,
            deltas=self.config.rollout.weight_deltas,
            relays=self.config.relay_fanout > 0,
            on_link_error=self.on_link_error,
            on_staging_failure=self.loading.on_staging_failure,
            on_arrival=self.loading.arriving,
            host=self.host,
        )

    async def start_engine_and_scorer(self) -> None:
        # If one fails, the other must not go on to start processes that nobody would end.
        await all_or_none([self._start_engine(), self._start_scorer()])

    async def _start_engine(self) -> None:
        with loading_model(self.config.model.path):
            await self.engine.start()
        # Room for one new token is needed.
        room = max(1, self.engine.max_context - 1)
        self.tokenizer.limit = min(room, self.config.data.max_prompt_tokens)
        self.engine.completion_finished = self.held.completion_finished

    async def _start_scorer(self) -> None:
        """Starts the processes that run code of users."""
        if self.config.recorded:
            return
        if self.environments is not None:
            name = str(self.config.rollout.environment)
            with waiting(WaitKind.ENVIRONMENT, f"importing {name}", name):
                await self.environments.start(self.engine, self.host)
        names = ", ".join(self.config.reward.functions)
        with waiting(WaitKind.REWARD, f"importing the reward functions {names}", names):
            for scorer in (self.scorer, *self.set_scorers.values()):
                await scorer.start()

    def connect_parts(self) -> None:
        config, engine, held = self.config, self.engine, self.held
        if config.scorers.by_name:
            self.group_scores = GroupScores(config, self._run_dir)
        partials = PartialRollouts(held)
        self.session = WorkerSession(
            self.control,
            worker_id=self.worker_id,
            role=common_pb2.ROLE_ROLLOUT,
            config=config,
            report=lambda: self.reports.message(),
            tensor_host=self.host,
            seat=seat_of(config, self.worker_id),
        )
        self.session.on_directive(self.converge)
        self.session.on_rejoin(self.rejoin)
        produce: Produce
        if isinstance(engine, NoEngine):
            produce = RecordedProducer(RowEncoder(config, self.tokenizer), engine).produce
        else:
            self.producer = GroupProducer(
                *(config, self.tokenizer, engine, self.scorer, self.environments),
                set_scorers=self.set_scorers,
                group_scores=self.group_scores,
                partials=partials,
            )
            produce = self.producer.produce
        self.tasks = TaskRunner(
            *(self.session, held, engine, produce, partials),
            limits=replace(GroupLimits.of(config), max_sequence_tokens=ANY),
            tasks_to_lease=self.tasks_to_lease,
            unwanted=self.unwanted,
            engine_died=self.lifecycle.engine_died,
        )
        if every := config.rollout.partial_every_tokens:
            engine.watch(every, partials.note)
        takes_turns = config.takes_turns
        parts = self.session, self.tasks, self.lifecycle, self.loop
        self.loading = WeightLoader(*parts, turns=takes_turns)
        if takes_turns:
            given = self.session, engine, self.tasks, self.loading
            self.turns = Turns(*given, start=self._start_engine)
        scorer = None if config.recorded else self.scorer
        reported = self.lifecycle, self.tasks, self.loading, scorer
        self.reports = RolloutReport(*reported, config.rollout.max_sequences, turns=self.turns)

    async def close(self) -> None:
        for task in self.held:
            self.tasks.drop(task)
        if self.receiver is not None:
            self.loading.close()
            self.receiver.close()
        if self.environments is not None:
            await self.environments.close()
        await self.engine.close()
        for scorer in (self.scorer, *self.set_scorers.values()):
            await scorer.close()
        if self.group_scores is not None:
            await self.group_scores.close()
        if self.admitted and self.tasks.outbox.store is not None:
            await self.tasks.outbox.store.close()
        await self.control.close()

    async def guard(self, loop: Awaitable[None]) -> None:
        try:
            await loop
        except EngineError as error:
            self.lifecycle.engine_died(error)
        except Exception as error:
            self.lifecycle.fail(error)

    # ---- directives and reports

    def converge(self, directive: worker_pb2.Directive) -> None:
        mine = [link for link in directive.links if link.receiver.worker_id == self.worker_id]
        if self.receiver is not None:
            link = max(mine, key=lambda link: link.epoch, default=None)
            self.receiver.name(directive.stored_weights)
            self.receiver.set_link(link, directive.version)
            if self.receiver.relay is not None:
                own = self.session.caller.incarnation
                sent = [k for k in directive.links if k.publisher.incarnation == own]
                self.receiver.relay.set_links(sent)
        if self.turns is not None:
            self.turns.directed(directive)
        if self.group_scores is not None:
            self.group_scores.directed(directive.scorers)
        for ref in directive.cancelled:
            if self.tasks.cancel(ref):
                event(log, "task cancelled", task=ref.task_id, attempt=ref.attempt)
        if directive.lifecycle == worker_pb2.LIFECYCLE_STOPPED:
            self.lifecycle.stop()
        elif directive.lifecycle == worker_pb2.LIFECYCLE_DRAINING:
            self.lifecycle.leaving.set()
        self.held.room.set()

    def rejoin(self, reply: worker_pb2.RegisterReply) -> None:
        """Everything that was held belongs to other workers by now."""
        self.tasks.drop_all()
        # The lease request of the incarnation that is over is sent again by the new one.
        self.held.room.set()
        self.loading.new_incarnation()
        if self.receiver is not None:
            self.receiver.set_link(None)
            if self.receiver.relay is not None:
                self.receiver.relay.set_links([])

    def on_link_error(self, generation: int, detail: str) -> None:
        """In the receiver's thread."""
        asyncio.run_coroutine_threadsafe(self.report_link_error(generation, detail), self.loop)

    async def report_link_error(self, generation: int, detail: str) -> None:
        error = worker_pb2.PeerError(
            caller=self.session.caller, epoch=generation, is_link=True, detail=detail[:500]
        )
        try:
            await self.session.call("WorkerService.ReportPeerError", error)
        except RequestRefused as refused:
            event(log, "link error refused", why=str(refused))

    # ---- leasing

    def may_lease(self) -> bool:
        directive = self.session.directive
        return (
            self.lifecycle.takes_tasks
            and directive is not None
            and directive.lifecycle == worker_pb2.LIFECYCLE_RUNNING
            and not directive.paused
            and self.engine.version >= 0
            and not self.loading.unwanted
            and self.has_device
        )

    @property
    def has_device(self) -> bool:
        return self.turns is None or self.turns.may_compute

    def tasks_to_lease(self, round_trip_s: float) -> int:
        if not self.may_lease():
            return 0
        rollout = self.config.rollout
        return tasks_wanted(
            slots=rollout.max_sequences,
            group_size=rollout.group_size,
            generating=self.held.unfinished(),
            sequences_per_s=self.reports.rates.sequences_per_s,
            round_trip_s=round_trip_s,
            unsent=len(self.tasks.outbox),
        )

    def unwanted(self) -> str:
        """Reason for which a lease is handed back at once; empty: its task is worked on."""
        # The request may have been on its way when this worker began to leave.
        if not self.lifecycle.takes_tasks:
            return "worker_leaving"
        return self.loading.unwanted or ("" if self.has_device else DEVICE_TAKEN)
