"""Capacity forecast of a fleet: the simulator without faults, with measured times.

Step and generation times come in as means and spreads; out come throughput and staleness. What it
knows is the schedule (admission, leases, steps, weights on their way); what it does not know is
contention for bandwidth or cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from controller.ledger import commands as cmd
from controller.simulator.cluster import Shape
from controller.simulator.world import World


@dataclass(frozen=True)
class PlannedFleet:
    """Times in seconds."""

    policy: int = 1
    rollout: int = 1
    slots: int = 16
    """Groups a rollout worker generates at once."""
    groups_per_step: int = 32
    max_staleness: int = 1
    steps: int = 20
    step_s: float = 1.0
    """Of one replica alone computing a whole step."""
    generate_s: float = 1.0
    """Mean time from lease to submission of a group."""
    spread: float = 0.5
    """Standard deviation of the logarithm of generation times; 0 for equal times."""
    transfer_s: float = 0.05
    """One-way delay of a message and of weights."""


@dataclass(frozen=True)
class Forecast:
    """Steps a second are after the first quarter of the run, which fills the pipeline."""

    steps_per_s: float
    groups_per_s: float
    staleness_mean: float
    staleness_max: int
    dropped_stale: int
    bound: str
    """Which side alone would be slower: training or generation."""
    ideal_steps_per_s: float
    """Of the slower side alone."""


def forecast(fleet: PlannedFleet, seed: int = 0) -> Forecast:
    """Simulates ``fleet`` and says what it would reach. Deterministic for a seed."""
    group_s = fleet.step_s / fleet.groups_per_step
    location = math.log(fleet.generate_s) - fleet.spread**2 / 2
    facts = cmd.RunSpec(
        run_id="plan",
        run_name="plan",
        seed=seed,
        steps=fleet.steps,
        groups_per_step=fleet.groups_per_step,
        group_size=2,
        max_staleness=fleet.max_staleness,
        max_attempts=3,
        dataset_rows=1_000_000,
        eval_rows=0,
        eval_every=fleet.steps,
        checkpoint_every=fleet.steps,
        filter_uninformative=False,
        shuffle=False,
        desired={},
    )
    shape = Shape(
        facts=facts,
        controllers=1,
        policy=fleet.policy,
        rollout=fleet.rollout,
        slots=fleet.slots,
        group_s=lambda rng: group_s,
        generate_s=lambda rng: rng.lognormvariate(location, fleet.spread),
        delay=fleet.transfer_s,
        wedged_after_s=1e9,
        checked=False,
    )
    world = World(seed, shape)
    commits: list[float] = []
    world.trace = lambda now, entry: commits.extend(
        now for event in entry.events if type(event).__name__ == "StepCommitted"
    )
    world.run(quiet_after=0.0, limit=1e9)
    warm = max(1, len(commits) // 4)
    steps_per_s = (len(commits) - warm) / (commits[-1] - commits[warm - 1])
    train = fleet.policy / fleet.step_s
    generate = fleet.rollout * fleet.slots / fleet.generate_s / fleet.groups_per_step
    trained = fleet.steps * fleet.groups_per_step
    return Forecast(
        steps_per_s=steps_per_s,
        groups_per_s=steps_per_s * fleet.groups_per_step,
        staleness_mean=world.oracle.staleness_sum / trained,
        staleness_max=world.oracle.max_staleness,
        dropped_stale=world.oracle.ledger.state.tasks.dropped["stale"],
        bound="training" if train < generate else "generation",
        ideal_steps_per_s=min(train, generate),
    )


def parse(words: list[str]) -> dict[str, int]:
    """``policy=4 rollout=16`` and other whole-number fields of PlannedFleet. Raises ValueError."""
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if equals != "=" or name not in ("policy", "rollout", "slots") or not value.isdigit():
            raise ValueError(f"{word!r}: give policy=N, rollout=N or slots=N")
        values[name] = int(value)
    return values


def show(fleet: PlannedFleet, result: Forecast) -> str:
    """A few lines for people."""
    share = result.steps_per_s / result.ideal_steps_per_s
    return "\n".join(
        [
            f"{fleet.policy} policy replicas, {fleet.rollout} rollout workers of {fleet.slots} "
            f"groups, {fleet.groups_per_step} groups a step, staleness up to {fleet.max_staleness}",
            f"  steps/s      {result.steps_per_s:.3f}  ({share:.0%} of {result.bound} alone, "
            f"{result.ideal_steps_per_s:.3f})",
            f"  groups/s     {result.groups_per_s:.2f}",
            f"  staleness    {result.staleness_mean:.2f} mean, {result.staleness_max} at most, of "
            f"each group's oldest token; {result.dropped_stale} groups dropped for it",
        ]
    )
