"""Command line and environment of each process of a local fleet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config.schema import Config
from paceline.process.torchrun_environment import without_place
from paceline.process.user_code import python_module
from paceline.process.worker_command import THREAD_VARIABLES
from paceline.rpc.ports import bindable, free_ports
from paceline.worker_pools import role_of, scorer_of, worker_name
from paceline_launcher.launch.child import ChildSpec

WORKER_NICE = 5


@dataclass(frozen=True, slots=True)
class Launcher:
    """Makes the ``ChildSpec`` of any process of a run."""

    config: Config
    config_path: Path
    run_dir: Path
    ports: Sequence[int]
    """Of the controllers."""

    @property
    def addresses(self) -> list[str]:
        """Addresses of the controllers as seen from this machine."""
        return [f"{_reachable(self.config.controller.host)}:{port}" for port in self.ports]

    def controller(self, index: int) -> ChildSpec:
        own = ("--port", str(self.ports[index]), *self._advertised())
        address = self.addresses[index]
        return self._spec("controller", index, "controller", own, address=address)

    def worker(self, pool: str, index: int) -> ChildSpec:
        own: tuple[str, ...] = ("--controllers", ",".join(self.addresses))
        if name := scorer_of(pool):
            own += ("--scorer", name)
        spec = self._spec(pool, index, f"{role_of(pool)}_worker", own, nice=WORKER_NICE)
        return replace(spec, environment={**spec.environment, **self._devices(pool, index)})

    def _advertised(self) -> tuple[str, ...]:
        """Options of a controller about the address under which others reach it."""
        return ()

    def _devices(self, pool: str, index: int) -> dict[str, str]:
        """Variables that give a worker its GPUs. Here it sees all of this machine."""
        return {}

    def _spec(
        self,
        pool: str,
        index: int,
        module: str,
        own: Sequence[str],
        nice: int = 0,
        address: str = "",
    ) -> ChildSpec:
        name = worker_name(pool, index)
        common = ("--run-dir", str(self.run_dir), "--id", name)
        return ChildSpec(
            name=name,
            role=pool,
            argv=(*python_module(module), str(self.config_path), *common, *own),
            environment=_environment(),
            log=self.run_dir / "logs" / f"{name}.log",
            nice=nice,
            address=address,
        )


def controller_ports(config: Config) -> list[int]:
    """The configured port and those after it, or free ones. A restarted controller keeps its port."""
    first, count = config.controller.port, config.fleet.controllers
    if first:
        return [first + index for index in range(count)]
    return free_ports(bindable(config.controller.host), count)


def _environment() -> dict[str, str]:
    # Processes that each use a thread pool of all cores slow one another down. Workers replace
    # these numbers by those of the configuration.
    pinned = dict.fromkeys(THREAD_VARIABLES, "1")
    return {
        **without_place(os.environ),
        **pinned,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host
