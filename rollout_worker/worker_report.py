"""The report that a rollout worker sends with every heartbeat."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.v1 import rollout_pb2, worker_pb2
from rollout_worker.engine.base import Engine
from rollout_worker.engine_rates import EngineRates
from rollout_worker.lifecycle import WorkerLifecycle
from rollout_worker.tasks.group_producer import GroupProducer
from rollout_worker.tasks.held_tasks import HeldTasks, Stage
from rollout_worker.tasks.lease_loop import LeaseLoop
from rollout_worker.tasks.outbox import Outbox
from rollout_worker.weight_receiver import WeightReceiver


@dataclass
class RolloutReport:
    lifecycle: WorkerLifecycle
    engine: Engine
    rates: EngineRates
    producer: GroupProducer
    held: HeldTasks
    outbox: Outbox
    leasing: LeaseLoop
    receiver: WeightReceiver | None = None
    """None until the worker is registered."""

    def message(self) -> worker_pb2.Report:
        stats = self.engine.stats()
        in_engine = stats.running + stats.waiting
        gauges = self.rates.read()
        gauges["unsent"] = float(len(self.outbox))
        gauges["continued_tokens"] = float(self.producer.continued_tokens)
        gauges["scoring"] = float(len(self.held.in_stage(Stage.SCORING)))
        if self.receiver is not None:
            gauges["transfer_s"] = self.receiver.last_transfer_s
        return worker_pb2.Report(
            lifecycle=self.lifecycle.state,
            progress=stats.tokens + stats.samples + stats.swaps + self.outbox.submitted,
            # Waiting for rewards or for the controller has limits of its own.
            busy=in_engine > 0,
            held_leases=self.held.refs(),
            state_version=-1,
            loaded_version=self.engine.version,
            link_epochs=self.receiver.formed_epochs() if self.receiver else [],
            gauges=gauges,
            activity=self._activity(in_engine),
        )

    def _activity(self, in_engine: int) -> str:
        if self.engine.version < 0:
            return "waiting for weights"
        if in_engine:
            return f"generating {in_engine} sequences"
        if len(self.held):
            return f"finishing {len(self.held)} tasks"
        reason = rollout_pb2.EmptyReason.Name(self.leasing.empty_reason)
        why = reason.removeprefix("EMPTY_REASON_").lower()
        return "waiting for tasks" if why == "unspecified" else f"waiting for tasks ({why})"
