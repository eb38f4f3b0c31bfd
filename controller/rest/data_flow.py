"""Flow of groups through the run: counts, staleness, the rate of steps and the bottleneck."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from controller.diagnosis.collect import headline
from controller.ledger import views
from controller.ledger.enums import Role
from controller.ledger.state.state import State
from controller.replicated_controller import Controller
from paceline.masking import Redactor
from paceline.observe.curves import seconds_left
from paceline.observe.runs import TIME_SPLIT
from paceline.worker_pools import in_order

STALLED_STEPS = 5.0
STALLED_S = 5.0  # A run has stalled after so many usual steps and so many seconds without a commit


def time_left_s(controller: Controller) -> float | None:
    """Until the run's last step, by the median of the newest; None: unknown, or the run is over. As
    of the projector's last glance, like the other two."""
    state = controller.state
    if state.ended:
        return None
    total = state.run_spec.steps if state.run_spec else controller.config.train.steps or 0
    return seconds_left(_step_s(controller), state.versions.step, total)


def last_commit_t(controller: Controller) -> float | None:
    """Unix seconds; None: no commit is known."""
    rows = controller.context.projector.glance.steps
    return float(rows[-1]["t"]) if rows else None


def stalled_s(controller: Controller) -> float:
    """Time since the last commit if that is far longer than a step; else 0."""
    rows, usual = controller.context.projector.glance.steps, _step_s(controller)
    # If the glance is behind this controller's ledger, the newest commit is younger.
    behind = bool(rows) and rows[-1]["step"] < controller.state.versions.step
    if not usual or behind or controller.state.ended:
        return 0.0
    since_s = time.time() - float(rows[-1]["t"])
    late = since_s > max(STALLED_S, STALLED_STEPS * median(usual))
    return round(since_s, 3) if late else 0.0


def _step_s(controller: Controller) -> list[float]:
    rows = controller.context.projector.glance.steps
    return [row["step_s"] for row in rows if row.get("step_s") is not None]


def flow(controller: Controller, redactor: Redactor) -> dict[str, Any]:
    state = controller.state
    metrics = state.steps.metrics
    steps = dict.fromkeys(state.tasks.ready, state.next_step)
    if state.steps.open is not None:
        steps.update(dict.fromkeys(state.steps.open.groups, state.steps.open.step))
    age_of = state.versions.staleness
    staleness = Counter(age_of(state.meta(t).min_version, step) for t, step in steps.items())
    config, spec = controller.settings.config, state.run_spec
    # The ledger's rules are those in force; before the run begins there are only the settings.
    rules = spec if spec is not None else config.train
    return {
        "bottleneck": redactor.text(headline(controller)),
        "stalled_s": stalled_s(controller),  # if this is not 0, the rates are old
        "tasks": asdict(views.counts(state)),
        # Groups that are ready or in a step, by the staleness of their oldest token.
        "staleness": {str(age): staleness[age] for age in sorted(staleness)},
        "max_staleness": rules.max_staleness,
        "late_groups": rules.late_groups,
        "max_token_age": rules.token_age,
        "ages": ages_of_step(metrics) if "late_share" in metrics else None,
        "groups_per_step": config.train.groups_per_step,
        "group_size": config.rollout.group_size,
        **{name: metrics.get(name) for name in ("tokens_per_s", "samples_per_s", "step_s")},
        # Seconds of the newest step by part; trainers: mean of the replicas.
        "time_split_s": {n: metrics[k] for n in TIME_SPLIT if (k := f"time_{n}_s") in metrics},
        "workers": workers_by_pool(state),
    }


def workers_by_pool(state: State) -> dict[str, int]:
    """Living workers of each pool that is desired or that has one."""
    found = Counter(w.pool for w in state.fleet.workers.values() if w.alive)
    pools = {str(Role.POLICY), str(Role.ROLLOUT), *state.desired, *found}
    return {pool: found[pool] for pool in in_order(pools)}


def ages_of_step(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Ages of what a step trained, and what it left out for its age, as docs/metrics.md has it."""
    parts = ("late", "masked", "dropped", "uninformative")
    lengths = {part: f"{part}_response_tokens_mean" for part in parts}
    lengths = {"all": "response_tokens_mean", **lengths}
    return {
        **{f"{part}_share": metrics[f"{part}_share"] for part in parts},
        "response_tokens": {n: metrics[key] for n, key in lengths.items() if key in metrics},
        "token_ages": token_ages_of(metrics),
        "ess": metrics.get("ess"),
    }


def token_ages_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Share of the trained tokens by age in steps as people read it: "0", "3-4", "33+"."""
    ages = {n.removeprefix("token_age_"): v for n, v in metrics.items() if n[:10] == "token_age_"}
    return {age.replace("_up", "+").replace("_", "-"): share for age, share in ages.items()}
