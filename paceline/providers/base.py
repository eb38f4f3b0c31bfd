"""The provider interface and functions that providers share.

    ledger's desired counts ──► status ──► converge ──► processes start, or are asked to leave

- A provider receives the desired state repeatedly and keeps no state of its own. It therefore
  survives failovers, and a lost or repeated call does no harm.
- It never ends a worker that has tasks: surplus workers are drained through the ledger, or by the
  scheduler's pre-stop hook (`paceline drain --wait`).
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from paceline.config.schema import Config
from paceline.errors import plural
from paceline.observe.fleet_file import FleetRecord, supervisor_gone
from paceline.v1 import admin_pb2, common_pb2
from paceline.worker_pools import in_order, role_of, scorer_of

GONE_OR_LEAVING = ("dead", "stopped", "draining")
AT_WORK = ("waiting", "running", "paused")  # phases of a run in which it needs workers

Drain = Callable[[admin_pb2.WorkerStatus], Awaitable[None]]
"""Asks one worker to leave without lowering the desired number. Idempotent for one process."""


def who_scales(provider: str, run_dir: Path) -> str:
    """Sentence for users: who starts and ends workers until there are as many as desired."""
    if provider == "none":
        return "surplus workers are drained; start missing ones yourself (fleet.provider is none)"
    if provider != "local":
        return f"the {provider} provider starts or drains workers"
    record = FleetRecord.read(run_dir)
    if record is not None and record.supervisor.alive():
        return f"`paceline up` (pid {record.supervisor.pid}) starts or drains workers"
    remedy = supervisor_gone(run_dir) or (
        "The processes were started by hand: start missing workers with `paceline policy`, "
        "`paceline rollout` or `paceline scorer`, and end surplus ones with `paceline drain WORKER`"
    )
    return f"nobody starts or drains workers. {remedy}"


class Trouble(Exception):
    """A provider cannot act. The message is one line, with the remedy if one is known."""


class Provider(ABC):
    name: str
    quiet_s: float = 10.0  # interval of calls, in seconds, while nothing changes in the ledger

    async def converge(self, status: admin_pb2.StatusReply) -> str:
        """Moves the fleet towards ``status.desired``. Returns quickly and never blocks the event
        loop. Returns a line for people that names what is still missing; empty if nothing is.
        Raises Trouble if it cannot act now; it is then called again a little later."""
        if status.phase not in AT_WORK:
            return ""
        pools = in_order(status.desired)
        missing = [await self._converge_pool(pool, status) for pool in pools]
        return "; ".join(filter(None, missing))

    @abstractmethod
    async def _converge_pool(self, pool: str, status: admin_pb2.StatusReply) -> str:
        """Does the same for one pool with a desired count."""

    async def close(self) -> None:  # noqa: B027  (optional)
        """Closes connections. Workers keep running."""


def moves(desired: int, staying: Iterable[str]) -> tuple[int, list[str]]:
    """Workers to start, and names to drain, so that ``desired`` of the pool are left; the highest
    numbers leave first. ``staying``: workers that run or start and are not leaving."""
    names = sorted(staying, key=number, reverse=True)
    return max(0, desired - len(names)), names[: max(0, len(names) - desired)]


def number(name: str) -> tuple[int, str]:
    """Sort key: the number at the end of the name (-1 if it has none), then the name."""
    found = re.search(r"(\d+)$", name)
    return (int(found[1]) if found else -1), name


def desired_of(status: admin_pb2.StatusReply, pool: str) -> int:
    """Desired processes of a pool: active workers and spares."""
    return int(status.desired[pool]) + int(status.spares.get(pool, 0))


def staying(status: admin_pb2.StatusReply, pool: str) -> dict[str, admin_pb2.WorkerStatus]:
    """Living workers of a pool that have not been asked to leave."""
    role = common_pb2.Role.Value(f"ROLE_{role_of(pool).upper()}")
    return {
        worker.worker_id: worker
        for worker in status.workers
        if (worker.role, worker.scorer) == (role, scorer_of(pool))
        and worker.state not in GONE_OR_LEAVING
    }


class NoProvider(Provider):
    name = "none"

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def _converge_pool(self, pool: str, status: admin_pb2.StatusReply) -> str:
        here = staying(status, pool)
        desired = desired_of(status, pool)
        missing, surplus = moves(desired, here)
        for name in surplus:
            await self._drain(here[name])
        if not missing:
            return ""
        scorer = f" --scorer {scorer_of(pool)}" if scorer_of(pool) else ""
        addresses = ",".join(c.address for c in status.controllers if c.state != "silent")
        command = f"paceline {role_of(pool)} CONFIG{scorer} --controllers {addresses}"
        counted = f"{missing} of {plural(desired, f'{pool} worker')}"
        return f"{counted} {'is' if missing == 1 else 'are'} missing: start them with `{command}`"


def leader_provider(config: Config, run_dir: str, drain: Drain) -> Provider | None:
    """The leader's provider; None for local, whose supervisor starts and ends the processes."""
    match config.fleet.provider:
        case "kubernetes":
            from paceline.providers.kubernetes import KubernetesProvider

            return KubernetesProvider(config.kubernetes)
        case "ray":
            from paceline.providers.ray import RayProvider

            return RayProvider(config, run_dir, drain)
        case "none":
            return NoProvider(drain)
    return None
