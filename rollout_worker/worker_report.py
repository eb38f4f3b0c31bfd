import time
from collections import deque
from dataclasses import InitVar, dataclass

from paceline.errors import plural
from paceline.process.worker_resources import Resources
from paceline.v1 import rollout_pb2, worker_pb2
from rollout_worker.engine.base import Engine, EngineStats
from rollout_worker.held_tasks import Stage
from rollout_worker.lifecycle import WorkerLifecycle
from rollout_worker.rewards.scoring import Scorer
from rollout_worker.tasks.task_runner import TaskRunner
from rollout_worker.turns import Turns
from rollout_worker.weight_loading import WeightLoader
from rollout_worker.weight_receiver import WeightReceiver

WINDOW_S = 5.0


class EngineRates:
    """Rates over the last seconds, from the engine's counters. Read on every report."""

    def __init__(self, engine: Engine, slots: int) -> None:
        """``slots``: sequences that the engine can run at once."""
        self._engine = engine
        self._slots = slots
        self._resources = Resources()
        self._readings: deque[tuple[float, EngineStats]] = deque()
        self.sequences_per_s = 0.0

    def read(self) -> dict[str, float]:
        """tokens_per_s, samples_per_s, engine_idle_fraction, running, waiting, slot_occupancy
        (share of the slots in use, mean of the readings), swap_s (total time that generation was
        paused for weights), and those of ``Resources``."""
        now, stats = time.monotonic(), self._engine.stats()
        self._readings.append((now, stats))
        while len(self._readings) > 2 and self._readings[1][0] < now - WINDOW_S:
            self._readings.popleft()
        then, before = self._readings[0]
        span = now - then
        gauges = {
            "running": float(stats.running),
            "waiting": float(stats.waiting),
            "slot_occupancy": sum(min(s.running, self._slots) for _, s in self._readings)
            / (len(self._readings) * self._slots),
            "swap_s": stats.swap_s,
            "stage_s": stats.stage_s,
            **self._resources.read(),
        }
        if span > 0.05:
            self.sequences_per_s = (stats.samples - before.samples) / span
            gauges["tokens_per_s"] = (stats.tokens - before.tokens) / span
            gauges["samples_per_s"] = self.sequences_per_s
            gauges["engine_idle_fraction"] = min(1.0, (stats.idle_s - before.idle_s) / span)
        return gauges


@dataclass
class RolloutReport:
    lifecycle: WorkerLifecycle
    tasks: TaskRunner
    loading: WeightLoader
    scorer: Scorer | None  # None: nothing is scored
    slots: InitVar[int]
    receiver: WeightReceiver | None = None  # None until the worker is registered
    turns: Turns | None = None  # None: the device is this worker's alone

    def __post_init__(self, slots: int) -> None:
        self.rates = EngineRates(self.tasks.engine, slots)

    def message(self) -> worker_pb2.Report:
        engine, held, outbox = self.tasks.engine, self.tasks.held, self.tasks.outbox
        stats = engine.stats()
        in_engine = stats.running + stats.waiting
        gauges = self.rates.read() | {
            "unsent": float(len(outbox)),
            "continued_tokens": float(self.tasks.partials.continued_tokens),
            "scoring": float(len(held.in_stage(Stage.SCORING))),
            "scoring_capacity": float(self.scorer.capacity if self.scorer else 0),
            "lease_s": self.tasks.round_trip_s,
        }
        progress, busy = (
            stats.tokens + stats.samples + stats.swaps + outbox.submitted,
            in_engine > 0,
        )
        if self.turns is not None:
            gauges |= self.turns.gauges
            progress, busy = progress + self.turns.switched, busy or self.turns.limited
        links: list[int] = []
        if self.receiver is not None:
            links += self.receiver.formed_generations()
            gauges["transfer_s"] = self.receiver.last_transfer_s
            if self.receiver.relay is not None:
                links += self.receiver.relay.formed_generations()
                gauges["relayed_bytes"] = float(self.receiver.relay.sent_bytes)
        return worker_pb2.Report(
            lifecycle=self.lifecycle.state,
            progress=progress,
            # Waiting for rewards or for the controller has limits of its own.
            busy=busy,
            held_leases=[task.lease.task for task in held],
            state_version=-1,
            loaded_version=engine.version,
            link_epochs=links,
            stored_weights=self.receiver.reading if self.receiver is not None else "",
            gauges=gauges,
            activity=self._activity(in_engine),
            seat=self.turns.turn.report if self.turns is not None else None,
            parity_failures=self.loading.parity_failures,
            parity_detail=self.loading.parity_detail[:512],
            load_failures=self.loading.failures,
            load_detail=self.loading.failure_detail[:512],
        )

    def _activity(self, in_engine: int) -> str:
        if self.turns is not None and (switch := self.turns.switch):
            return switch
        if self.turns is not None and self.turns.turn.parked:
            return "parked"
        if self.tasks.engine.version < 0:
            return "waiting for weights"
        if in_engine:
            return f"generating {plural(in_engine, 'sequence')}"
        if len(self.tasks.held):
            return "scoring and submitting"
        reason = rollout_pb2.EmptyReason.Name(self.tasks.empty_reason)
        why = reason.removeprefix("EMPTY_REASON_").lower()
        return "waiting for tasks" if why == "unspecified" else f"waiting for tasks ({why})"
