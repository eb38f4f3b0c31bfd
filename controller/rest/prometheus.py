"""Prometheus metrics of one controller, in base units. Counters end in _total."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.directives import ROLES
from controller.ledger.enums import Role
from controller.replicated_controller import Controller
from controller.rest.data_flow import last_commit_t, token_ages_of
from controller.status import status_head, status_of
from paceline.v1 import admin_pb2

Values = Mapping[Any, float]
"""Numbers by the value of a label, or by the tuple of the values of several labels."""

TASK_STATES = ("pending", "leased", "ready", "in_step", "trained")
MOST_WORKERS = 5000
"""Above this, workers are only counted: a series for each would overload the scraper."""
ROLE_NAMES = {value: str(role) for role, value in ROLES.items()}
OF_STEP = (
    *("reward_mean", "reward_std", "loss", "kl", "kl_behaviour", "kl_coef", "value_loss"),
    *("value_mean", "return_mean", "explained_variance", "grad_norm_critic", "pair_accuracy"),
    *("reward_margin", "chosen_reward", "rejected_reward", "chosen_logprob_shift", "entropy"),
    *("clip_fraction", "dual_clip_fraction", "update_skipped", "grad_norm", "lr"),
    *("logprob_gap_mean", "logprob_gap_max", "logprob_gap_fresh_mean", "logprob_gap_fresh_max"),
    *("staleness_mean", "staleness_max", "late_share", "masked_share", "dropped_share"),
    *("zero_variance_share", "uninformative_share", "prompts_truncated", "prompts_too_long"),
    *("ess", "response_tokens_mean"),
    *("late_response_tokens_mean", "masked_response_tokens_mean", "dropped_response_tokens_mean"),
    *("uninformative_response_tokens_mean", "sequences_per_sample"),
    *("tokens_per_s", "samples_per_s", "step_s", "tokens_per_s_device"),
    *("trainer_busy", "engine_busy", "device_busy", "mfu", "engine_tokens_per_s_device"),
)
"""Metrics of the newest step, which docs/metrics.md defines."""
OF_WORKER = {
    "heartbeat_age_s": ("heartbeat_age_seconds", "Since the last report"),
    "version": ("weights_version", "Held or served"),
    "rss_bytes": ("resident_memory_bytes", "Resident memory of its main process"),
    "memory_bytes": ("memory_bytes", "Resident memory of all its processes"),
    "gpu_memory_bytes": ("gpu_memory_bytes", "Memory used on its GPUs"),
    "gpu_utilization": ("gpu_utilization_ratio", "Share of time that its GPUs are busy"),
    "engine_idle_fraction": ("engine_idle_ratio", "Share of time that its engine stands idle"),
    "slot_occupancy": ("engine_slot_occupancy_ratio", "Share of its engine's slots in use"),
    "tokens_per_s": ("generated_tokens_per_second", "Tokens it generates"),
    "hand_back_s": ("hand_back_seconds", "Newest hand-back of its tasks at the end of a turn"),
    "park_s": ("park_seconds", "Newest time that it gave its device up"),
    "unpark_s": ("unpark_seconds", "Newest time that it took its device again"),
    "unpark_load_s": ("unpark_load_seconds", "Newest load of weights at the begin of a turn"),
}  # Name and help text of what is known of each worker, and of the gauges of its report
RENAMED = {
    "tokens_per_s": "tokens_per_second",
    "samples_per_s": "samples_per_second",
    "step_s": "step_duration_seconds",
    "ess": "effective_sample_size_ratio",
    "tokens_per_s_device": "tokens_per_second_per_device",
    "engine_tokens_per_s_device": "engine_tokens_per_second_per_device",
    **{name: f"{name}_ratio" for name in ("trainer_busy", "engine_busy", "device_busy", "mfu")},
}


class PrometheusMetrics(Collector):
    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        controller, state = self._controller, self._controller.state
        view, steps = status_head(controller), state.steps
        committed_t = last_commit_t(controller)
        yield _metric("leader", "1 if this controller leads", controller.leader is not None)
        yield _metric("term", "Term of leadership, as this controller knows it", view.term)
        yield _metric("step", "Committed steps on the surviving line", view.step)
        yield _metric("steps_desired", "Steps of the whole run", view.total_steps)
        yield _metric("weights_version", "Newest committed version", view.version)
        yield _metric("mesh_epoch", "Epoch of the trainers' mesh", view.mesh_epoch)
        yield _metric("checkpoint_step", "Step of the newest checkpoint", view.checkpoint_step)
        yield _metric("paused", "1 while the run is paused", state.paused)
        yield _metric("start_time_seconds", "Start of the run, Unix time", state.started_t)
        yield _metric("last_commit_time_seconds", "Newest step's commit, Unix time", committed_t)
        lost = "lost steps included"
        yield _metric("samples_trained_total", f"Samples trained, {lost}", steps.samples_trained)
        yield _metric("tokens_trained_total", f"Tokens trained, {lost}", steps.tokens_trained)
        yield _metric("failovers_total", "Changes of leader", view.failovers)
        yield _metric("mesh_rebuilds_total", "Meshes formed because one broke", view.mesh_rebuilds)
        help_text = "Swaps after which an engine's parameters differed from the weights"
        yield _metric("parity_failures_total", help_text, state.fleet.parity_failures)
        yield _metric("rollbacks_total", "Returns to a checkpoint", state.versions.rollbacks)
        yield _metric("tasks_dispatched_total", "Groups dispatched", view.tasks.dispatched)
        tasks = {name: getattr(view.tasks, name) for name in TASK_STATES}
        yield _metric("tasks", "Groups by state", tasks, "state")
        yield _metric(
            "tasks_dropped_total", "Groups dropped, by reason", view.tasks.dropped, "reason"
        )
        # A metric that the run lacks has no value, so that every name can be looked up.
        for name in OF_STEP:
            help_text = f"{name} of the newest step, as docs/metrics.md defines it"
            yield _metric(RENAMED.get(name, name), help_text, view.metrics.get(name))
        times = (re.fullmatch("time_(.*)_s", name) for name in view.metrics)
        parts = {found[1]: view.metrics[found[0]] for found in times if found}
        yield _metric("step_part_seconds", "Time split of the newest step", parts, "part")
        ages = token_ages_of(view.metrics)
        yield _metric("token_age_share", "Trained tokens by age, in steps", ages, "age")
        yield _metric("workers_desired", "Desired workers", view.desired, "role")
        leader = controller.leader
        proposed = dict(view.desired) if leader is not None else {}
        if leader is not None and leader.proposal is not None:
            proposed |= leader.proposal.desired
        help_text = "Workers the autoscaler proposes; the desired ones if it proposes no change"
        yield _metric("workers_proposed", help_text, proposed, "role")
        sinks = controller.sink_states()
        for name, key, help_text in (
            ("sink_points_total", "written", "Points written to a sink in this term"),
            ("sink_failing", "failing", "1 if a sink cannot be written to"),
        ):
            yield _metric(name, help_text, {sink["name"]: sink[key] for sink in sinks}, "sink")
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        found = status_of(self._controller).workers
        numbers = Counter((ROLE_NAMES.get(w.role, "unknown"), w.state) for w in found)
        yield _metric("workers", "Workers", numbers, "role", "state")
        values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in OF_WORKER}
        for worker in found if len(found) <= MOST_WORKERS else ():
            labels = (worker.worker_id, ROLE_NAMES.get(worker.role, "unknown"))
            for name in OF_WORKER.keys() & worker.gauges.keys():
                values[name][labels] = worker.gauges[name]
            values["version"][labels] = worker.version
            if worker.heartbeat_age_s >= 0:
                values["heartbeat_age_s"][labels] = worker.heartbeat_age_s
        for name, (shown, help_text) in OF_WORKER.items():
            yield _metric(f"worker_{shown}", help_text, values[name], "worker", "role")
        scorers = (w for w in found if w.role == ROLES[Role.SCORER])
        yield from scorer_metrics(scorers if len(found) <= MOST_WORKERS else ())


def _metric(name: str, help_text: str, value: Values | float | None, *labels: str) -> Metric:
    """``paceline_<name>``: a counter if it ends in _total, else a gauge. ``labels``: names for the
    keys of ``value``."""
    family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    if not isinstance(value, Mapping):
        return family(f"paceline_{name}", help_text, value)
    metric = family(f"paceline_{name}", help_text, labels=labels)
    for key, number in sorted(value.items()):
        metric.add_metric((key,) if isinstance(key, str) else key, number)
    return metric


def scorer_metrics(workers: Iterable[admin_pb2.WorkerStatus]) -> Iterator[Metric]:
    """Completions that scorers have scored, those that wait, and the time of their requests. Each
    family exists without a scorer too, so that its name can be looked up."""
    found = [((worker.worker_id, worker.scorer), worker.gauges) for worker in workers]
    for gauge, name, help_text in (
        ("scored", "scorer_completions_total", "Completions that it scored"),
        ("queued", "scorer_queued_completions", "Completions that wait for its score"),
        ("scored_requests", "scorer_requests_total", "Requests that it answered with scores"),
        ("request_s", "scorer_request_seconds_total", "From their arrival to their scores"),
    ):
        values = {labels: gauges[gauge] for labels, gauges in found if gauge in gauges}
        yield _metric(name, help_text, values, "worker", "scorer")
