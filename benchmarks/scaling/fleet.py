"""Throughput of a real fleet with emulated devices: controller, Redis, gRPC and every worker are
processes."""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.scaling.alone import Batch
from benchmarks.scaling.device_times import DeviceTimes
from testbed.fleets.local_run import Up, write_run

LEAST_STEPS = 3
"""Measured."""
ENDLESS = 1_000_000
LIMIT_S = 300.0
WAITED_S = 0.05


@dataclass(frozen=True, slots=True)
class Cell:
    rollouts: int
    max_staleness: int
    batch: Batch
    times: DeviceTimes
    warm_up: int = 3
    """Steps until the clock starts."""
    policies: int = 1
    """Replicas, each of ``times.policy_gpus``."""
    sharing: str = "none"
    """Otherwise replicas and rollout workers are pairs, each at one device."""
    fleet: Mapping[str, int] = field(default_factory=dict)
    """Further settings of the fleet."""

    @property
    def groups_admitted(self) -> int:
        """Beside those that are being trained."""
        return max(1, self.max_staleness) * self.batch.groups

    @property
    def groups_needed(self) -> float:
        """Groups by Little's law for which all slots of all engines are taken.

        A group stays until its longest completion.
        """
        sequences = self.rollouts * self.times.slots
        return sequences / self.batch.group_size * self.times.group_stretch(self.batch.group_size)


def measure(cell: Cell, window_s: float) -> dict[str, Any]:
    """Rates between the commits of two steps after the warm-up, ``window_s`` apart or more."""
    with started(cell) as up:
        up.until(lambda: _complete(_in_time(steps(up), cell.warm_up), window_s), LIMIT_S)
        begun, *measured = _in_time(steps(up), cell.warm_up)
    seconds = measured[-1]["t"] - begun["t"]
    samples = sum(row["samples"] for row in measured)
    return {
        "rollouts": cell.rollouts,
        "max_staleness": cell.max_staleness,
        "slots": cell.times.slots,
        "groups_per_step": cell.batch.groups,
        "groups_admitted": cell.groups_admitted,
        "groups_needed": cell.groups_needed,
        "steps": len(measured),
        "seconds": seconds,
        "samples_per_s": samples / seconds,
        "tokens_per_s": tokens_per_s(begun, measured),
        "training_s": sum(r["time_compute_s"] + r["time_commit_s"] for r in measured)
        / len(measured),
        "waited_s": sum(r["time_wait_s"] for r in measured) / len(measured),
    }


@contextlib.contextmanager
def started(cell: Cell) -> Iterator[Up]:
    """The fleet of ``cell``, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="paceline-scaling-") as name:
        up = Up(_config(cell, Path(name)), Path(name) / "run", environment=cell.times.environment())
        try:
            yield up
        finally:
            up.close()


def tokens_per_s(begun: dict[str, Any], measured: list[dict[str, Any]]) -> float:
    """Of the steps ``measured``, which were trained after the commit of ``begun``."""
    tokens: float = sum(row["response_tokens_mean"] * row["samples"] for row in measured)
    return tokens / float(measured[-1]["t"] - begun["t"])


def steps(up: Up) -> list[dict[str, Any]]:
    """Metrics of the committed steps, in order."""
    return sorted((r for r in up.metrics() if r["kind"] == "step"), key=lambda row: row["step"])


def _in_time(rows: list[dict[str, Any]], warm_up: int) -> list[dict[str, Any]]:
    """Rows from the first step after the warm-up to the last that the trainer had to wait for.

    No group was left over before either: what was trained between them was generated between them,
    and not while the trainer had not started yet. All steps after the warm-up if it hardly waited.
    """
    late = rows[warm_up - 1 :]
    waited = [at for at, row in enumerate(late) if row["time_wait_s"] >= WAITED_S]
    between = late[waited[0] : waited[-1] + 1] if waited else []
    return between if 2 * len(between) >= len(late) else late


def _complete(rows: list[dict[str, Any]], window_s: float) -> bool:
    return len(rows) > LEAST_STEPS and rows[-1]["t"] - rows[0]["t"] >= window_s


def _config(cell: Cell, where: Path) -> Path:
    return write_run(
        where,
        rows=512,
        reward={"functions": ["benchmarks.rewards:first_digit"], "processes": 0},
        train={
            "steps": ENDLESS,
            "groups_per_step": cell.batch.groups,
            "max_staleness": cell.max_staleness,
            "checkpoint_every": ENDLESS,
            "eval_every": ENDLESS,
            "optimizer": {"lr": 1e-6},
        },
        rollout={
            "group_size": cell.batch.group_size,
            "max_tokens": cell.times.most_tokens,
            "max_sequences": cell.times.slots,
        },
        fleet={
            "controllers": 1,
            "policy": cell.policies,
            "rollout": cell.rollouts,
            "sharing": cell.sharing,
            **cell.fleet,
        },
    )
