"""Ray provider: one placement group and one actor for each worker.

    leader ──JSON lines──► driver process ──Ray──► placement group + actor ──► the worker's process

- Ray places processes; membership and state belong to the ledger. An actor starts the normal worker
  command on its machine, reports how it ended, and ends it when the actor itself is ended.
- Actors and groups are detached: they outlive the driver, so a failover changes nothing. The next
  leader's driver finds them by name.
- The Ray client runs in a process of its own, so it never delays the leader.
"""

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

from paceline.config.load import to_toml
from paceline.config.schema import Config
from paceline.providers.base import (
    AT_WORK,
    Drain,
    Provider,
    Trouble,
    desired_of,
    moves,
    number,
    staying,
)
from paceline.user_code import python_module
from paceline.v1 import admin_pb2
from paceline.worker_pools import POLICY, role_of, scorer_of, worker_name

ANSWER_LIMIT_S = 60.0
CLOSE_LIMIT_S = 5.0
OVER = ("finished", "failed")


@dataclass(frozen=True, slots=True)
class Placed:
    name: str
    pool: str
    state: str
    """pending: not placed yet. silent: placed, but the actor does not answer. running. ended."""
    pid: int = 0
    exit_code: int | None = None


class RayProvider(Provider):
    name = "ray"
    quiet_s = 2.0

    def __init__(self, config: Config, run_dir: str, drain: Drain) -> None:
        self._config = config
        self._run_dir = run_dir
        self._drain = drain
        self._process: asyncio.subprocess.Process | None = None
        self._placed: list[Placed] = []  # workers that the driver has listed in this call

    async def converge(self, status: admin_pb2.StatusReply) -> str:
        if status.phase not in (*AT_WORK, *OVER):
            return ""
        self._placed = [Placed(**one) for one in (await self._ask(op="list"))["placed"]]
        for one in self._placed:
            if one.state == "ended":
                # If the worker is still desired, it is started again.
                await self._ask(op="remove", name=one.name)
        return await super().converge(status)

    async def _converge_pool(self, pool: str, status: admin_pb2.StatusReply) -> str:
        here = {p.name: p for p in self._placed if p.pool == pool and p.state != "ended"}
        known = {w.worker_id: w for w in status.workers}
        leaving = {
            name
            for name, p in here.items()
            if name in known
            and (known[name].pid == p.pid or p.state == "silent")
            and known[name].state in ("draining", "stopped")
        }
        missing, surplus = moves(desired_of(status, pool), here.keys() - leaving)
        for name in surplus:
            worker = staying(status, pool).get(name)
            if worker is not None and worker.pid == here[name].pid:
                await self._drain(worker)
            elif here[name].state == "pending":
                await self._ask(op="remove", name=name)
        names = (worker_name(pool, index) for index in range(len(here) + missing))
        for name in [name for name in names if name not in here][:missing]:
            await self._ask(op="start", **self._order(pool, name, status))
        waiting = sorted((n for n, p in here.items() if p.state == "pending"), key=number)
        return f"{', '.join(waiting)}: waiting for cluster resources" if waiting else ""

    def _order(self, pool: str, name: str, status: admin_pb2.StatusReply) -> dict[str, Any]:
        fleet, ray = self._config.fleet, self._config.ray
        role = role_of(pool)
        policy = role == POLICY
        threads = getattr(fleet, f"{role}_threads")
        own = ["--scorer", scorer_of(pool)] if scorer_of(pool) else []
        # Ray keeps an actor's arguments, and whoever reaches the cluster can read them. The address
        # of Redis may have a password in it; workers get theirs from the controller, once they
        # present the token.
        redis = self._config.redis.model_copy(update={"url": None})
        return {
            "name": name,
            "pool": pool,
            "cpus": threads * (fleet.policy_ranks if policy else 1),
            "gpus": getattr(ray, f"{role}_gpus"),
            # The text of the file: the machine may not have the file.
            "config": to_toml(self._config.model_copy(update={"redis": redis})),
            "module": f"{role}_worker",
            "arguments": [
                *("--controllers", ",".join(c.address for c in status.controllers)),
                *("--id", name, "--run-dir", self._run_dir, *own),
            ],
            "environment": dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)),
            "log": f"{self._run_dir}/logs/{name}.log",
        }

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _ask(self, **request: Any) -> dict[str, Any]:
        """The driver's answer. Raises Trouble if the driver reports an error or has ended."""
        process = await self._driver()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except (OSError, TimeoutError, asyncio.CancelledError) as error:
            # Otherwise the answer to this request would be taken for that of the next.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            self._process = None
            if isinstance(error, TimeoutError):
                address = self._config.ray.address
                raise Trouble(
                    f"Ray at {address} did not answer for {ANSWER_LIMIT_S:.0f} s: does `ray status "
                    f"--address {address}` list the cluster?"
                ) from None
            raise
        if not line:
            await process.wait()
            self._process = None
            raise Trouble(f"the Ray driver ended (exit status {process.returncode})")
        answer: dict[str, Any] = json.loads(line)
        if "trouble" in answer:
            raise Trouble(str(answer["trouble"]))
        return answer

    async def _driver(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *python_module("paceline.providers.ray_driver"),
                *(self._config.ray.address, self._config.run.name),
                # Ray puts the driver's directory first on its workers' path.
                cwd="/",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 24,
            )
        return self._process


async def give_back_places(config: Config) -> str:
    """Ends all actors of a run that has ended: Ray keeps their places, and no leader gives them
    back any more. Returns the trouble with it; empty if there is none."""

    async def nobody(worker: admin_pb2.WorkerStatus) -> None:
        """Drains nothing: the run has ended."""

    provider = RayProvider(config, "", nobody)
    try:
        for one in (await provider._ask(op="list"))["placed"]:
            await provider._ask(op="remove", name=one["name"])
    except Trouble as trouble:
        return f"places on the Ray cluster are not given back: {trouble}"
    finally:
        await provider.close()
    return ""
