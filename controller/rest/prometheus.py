"""Prometheus metrics of one controller, in base units. Counters end in _total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.ledger import views
from controller.replicated_controller import Controller
from controller.rest.step_rate import StepRate
from controller.status import status_of
from paceline.v1 import common_pb2

MOST_WORKERS = 5000
"""Above this, workers are only counted: a series for each would overload the scraper."""
ROLES = {common_pb2.ROLE_POLICY: "policy", common_pb2.ROLE_ROLLOUT: "rollout"}
OF_STEP = {
    "reward_mean": "Mean reward of the newest step",
    "reward_std": "Standard deviation of its rewards",
    "loss": "Its loss",
    "kl": "Its KL divergence from the reference, in nats",
    "kl_behaviour": "Its KL divergence of the trainer from the policy that sampled, in nats",
    "entropy": "Its mean entropy, in nats",
    "clip_fraction": "Share of its tokens that were clipped",
    "grad_norm": "Norm of its gradient",
    "lr": "Its learning rate",
    "logprob_gap_mean": "Mean gap between sampled and recomputed log-probabilities, in nats",
    "logprob_gap_max": "Largest such gap, in nats",
    "logprob_gap_fresh_mean": "Mean gap over tokens of staleness 0 alone, in nats",
    "logprob_gap_fresh_max": "Largest gap over tokens of staleness 0 alone, in nats",
    "staleness_mean": "Mean staleness of its tokens, in steps",
    "staleness_max": "Largest staleness of its tokens, in steps",
    "response_tokens_mean": "Mean length of its completions, in tokens",
    "tokens_per_s": "Tokens trained per second",
    "samples_per_s": "Samples trained per second",
}
OF_WORKER = {
    "rss_bytes": ("resident_memory_bytes", "Resident memory of its main process"),
    "memory_bytes": ("memory_bytes", "Resident memory of all its processes"),
    "gpu_memory_bytes": ("gpu_memory_bytes", "Memory used on its GPUs"),
    "gpu_utilization": ("gpu_utilization_ratio", "Share of time that its GPUs are busy"),
    "engine_idle_fraction": ("engine_idle_ratio", "Share of time that its engine stands idle"),
    "slot_occupancy": ("engine_slot_occupancy_ratio", "Share of its engine's slots in use"),
    "tokens_per_s": ("generated_tokens_per_second", "Tokens it generates"),
}
"""Name and help text of each gauge of a worker's report."""
RENAMED = {"tokens_per_s": "tokens_per_second", "samples_per_s": "samples_per_second"}


class PrometheusMetrics(Collector):
    """``text()`` returns the text exposition format, version 0.0.4."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, controller: Controller, rate: StepRate | None = None) -> None:
        self._controller = controller
        self._rate = rate
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        controller = self._controller
        view = views.status(controller.state)
        for name, help_text, value in (
            ("paceline_leader", "1 if this controller leads", controller.leader is not None),
            ("paceline_term", "Term of leadership, as this controller knows it", view.term),
            ("paceline_step", "Committed steps on the surviving line", view.step),
            ("paceline_steps_desired", "Steps of the whole run", view.total_steps),
            ("paceline_weights_version", "Newest committed version", view.version),
            ("paceline_mesh_epoch", "Epoch of the trainers' mesh", view.mesh_epoch),
            ("paceline_checkpoint_step", "Step of the newest checkpoint", view.checkpoint_step),
            ("paceline_paused", "1 while the run is paused", controller.state.paused),
            (
                "paceline_start_time_seconds",
                "Start of the run, Unix time",
                controller.state.started_t,
            ),
        ):
            yield GaugeMetricFamily(name, help_text, float(value))
        for name, help_text, value in (
            (
                "paceline_samples_trained",
                "Samples trained, lost steps included",
                view.samples_trained,
            ),
            ("paceline_tokens_trained", "Tokens trained, lost steps included", view.tokens_trained),
            ("paceline_failovers", "Changes of leader", view.failovers),
            ("paceline_mesh_rebuilds", "Meshes formed because one broke", view.mesh_rebuilds),
            ("paceline_rollbacks", "Returns to a checkpoint", view.rollbacks),
            ("paceline_tasks_dispatched", "Groups dispatched", view.tasks.dispatched),
        ):
            yield CounterMetricFamily(name, help_text, float(value))
        yield GaugeMetricFamily(
            "paceline_last_commit_time_seconds",
            "Commit of the newest step, Unix time",
            self._rate.last_commit_t if self._rate is not None else None,
        )
        yield from self._tasks(view)
        yield from self._step(view)
        yield from self._workers(view)

    def _tasks(self, view: views.StatusView) -> Iterator[Metric]:
        states = GaugeMetricFamily("paceline_tasks", "Groups by state", labels=["state"])
        for state in ("pending", "leased", "ready", "in_step", "trained"):
            states.add_metric([state], getattr(view.tasks, state))
        yield states
        dropped = CounterMetricFamily(
            "paceline_tasks_dropped", "Groups dropped, by reason", labels=["reason"]
        )
        for reason, count in sorted(view.tasks.dropped.items()):
            dropped.add_metric([reason], count)
        yield dropped

    @staticmethod
    def _step(view: views.StatusView) -> Iterator[Metric]:
        # A metric that the run lacks has no value, so that every name can be looked up.
        for name, help_text in OF_STEP.items():
            shown = RENAMED.get(name, name)
            yield GaugeMetricFamily(f"paceline_{shown}", help_text, view.metrics.get(name))
        yield GaugeMetricFamily(
            "paceline_step_duration_seconds", "Of the newest step", view.metrics.get("step_s")
        )
        parts = GaugeMetricFamily(
            "paceline_step_part_seconds", "Time split of the newest step", labels=["part"]
        )
        for name, value in sorted(view.metrics.items()):
            if name.startswith("time_") and name.endswith("_s"):
                parts.add_metric([name[5:-2]], value)
        yield parts

    def _workers(self, view: views.StatusView) -> Iterator[Metric]:
        desired = GaugeMetricFamily("paceline_workers_desired", "Desired workers", labels=["role"])
        for role, count in sorted(view.desired.items()):
            desired.add_metric([role], count)
        yield desired
        yield self._proposed(view)
        yield from self._sinks()
        found = status_of(self._controller).workers
        number = GaugeMetricFamily("paceline_workers", "Workers", labels=["role", "state"])
        counts = Counter((ROLES.get(w.role, "unknown"), w.state) for w in found)
        for (role, state), count in sorted(counts.items()):
            number.add_metric([role, state], count)
        yield number
        if len(found) > MOST_WORKERS:
            found = []
        labels = ["worker", "role"]
        age = GaugeMetricFamily(
            "paceline_worker_heartbeat_age_seconds", "Since the last report", labels=labels
        )
        version = GaugeMetricFamily(
            "paceline_worker_weights_version", "Held or served", labels=labels
        )
        gauges = {
            name: GaugeMetricFamily(f"paceline_worker_{shown}", help_text, labels=labels)
            for name, (shown, help_text) in OF_WORKER.items()
        }
        for worker in found:
            names = [worker.worker_id, ROLES.get(worker.role, "unknown")]
            version.add_metric(names, worker.version)
            if worker.heartbeat_age_s >= 0:
                age.add_metric(names, worker.heartbeat_age_s)
            for name, family in gauges.items():
                if name in worker.gauges:
                    family.add_metric(names, worker.gauges[name])
        yield from (age, version, *gauges.values())

    def _proposed(self, view: views.StatusView) -> Metric:
        proposed = GaugeMetricFamily(
            "paceline_workers_proposed",
            "Workers the autoscaler proposes; the desired ones if it proposes no change",
            labels=["role"],
        )
        leader = self._controller.leader
        if leader is not None:
            counts = dict(view.desired)
            if leader.proposal is not None:
                counts |= asdict(leader.proposal.counts)
            for role, count in sorted(counts.items()):
                proposed.add_metric([role], count)
        return proposed

    def _sinks(self) -> Iterator[Metric]:
        points = CounterMetricFamily(
            "paceline_sink_points", "Points written to a sink in this term", labels=["sink"]
        )
        failing = GaugeMetricFamily(
            "paceline_sink_failing", "1 if a sink cannot be written to", labels=["sink"]
        )
        for sink in self._controller.sink_states():
            points.add_metric([sink["name"]], sink["written"])
            failing.add_metric([sink["name"]], sink["failing"])
        yield from (points, failing)
