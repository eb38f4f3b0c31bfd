"""Flow of groups through the run: their ages, and commits that are late."""

import time
from collections import Counter
from collections.abc import Mapping
from statistics import median

from controller.ledger.enums import Role
from controller.ledger.state.state import State
from controller.replicated_controller import Controller
from controller.status import step_seconds
from paceline.worker_pools import in_order

STALLED_STEPS = 5.0
STALLED_S = 5.0  # A run has stalled after so many usual steps and so many seconds without a commit


def last_commit_t(controller: Controller) -> float | None:
    """Unix seconds, as of the projector's last glance; None: no commit is known."""
    rows = controller.context.projector.glance.steps
    return float(rows[-1]["t"]) if rows else None


def stalled_s(controller: Controller) -> float:
    """Time since the last commit if that is far longer than a step; else 0."""
    rows, usual = controller.context.projector.glance.steps, step_seconds(controller)
    # If the glance is behind this controller's ledger, the newest commit is younger.
    behind = bool(rows) and rows[-1]["step"] < controller.state.versions.step
    if not usual or behind or controller.state.ended:
        return 0.0
    since_s = time.time() - float(rows[-1]["t"])
    late = since_s > max(STALLED_S, STALLED_STEPS * median(usual))
    return round(since_s, 3) if late else 0.0


def ages_in_flight(state: State) -> dict[str, int]:
    """Groups that are ready or in a step, by the staleness of their oldest token."""
    steps = dict.fromkeys(state.tasks.ready, state.next_step)
    if state.steps.open is not None:
        steps.update(dict.fromkeys(state.steps.open.groups, state.steps.open.step))
    age_of = state.versions.staleness
    staleness = Counter(age_of(state.meta(t).min_version, step) for t, step in steps.items())
    return {str(age): staleness[age] for age in sorted(staleness)}


def workers_by_pool(state: State) -> dict[str, int]:
    """Living workers of each pool that is desired or that has one."""
    found = Counter(w.pool for w in state.fleet.workers.values() if w.alive)
    pools = {str(Role.POLICY), str(Role.ROLLOUT), *state.desired, *found}
    return {pool: found[pool] for pool in in_order(pools)}


def token_ages_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Share of the trained tokens by age in steps as people read it: "0", "3-4", "33+"."""
    ages = {n.removeprefix("token_age_"): v for n, v in metrics.items() if n[:10] == "token_age_"}
    return {age.replace("_up", "+").replace("_", "-"): share for age, share in ages.items()}
