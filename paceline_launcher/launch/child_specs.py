"""Command line and environment of each process of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.config.schema import Config
from paceline.process.torchrun_environment import without_place
from paceline.process.user_code import python_module
from paceline.process.worker_command import THREAD_VARIABLES
from paceline.rpc.addresses import at, is_loopback
from paceline.rpc.listeners import UNIX, socket_path
from paceline.rpc.ports import bindable, free_ports
from paceline.worker_pools import POLICY, role_of, scorer_of, worker_index, worker_name
from paceline_launcher.launch.child import ChildSpec
from paceline_launcher.launch.replica_ranks import RANK, replica_of

CONTROLLER = "controller"  # Role of a process that is no worker. The role of a worker is its pool.
WORKER_NICE = 5


@dataclass(frozen=True, slots=True)
class ChildSpecs:
    config: Config
    config_path: Path
    run_dir: Path
    ports: Sequence[int]
    master: str = ""
    """Address of node 0, under which every node reaches the controllers; empty: there is one
    node."""

    @property
    def addresses(self) -> list[str]:
        bound = self.config.controller.host
        host = self.master or ("127.0.0.1" if bound in ("0.0.0.0", "::") else bound)
        return [
            at(host, port)
            if port
            else f"{UNIX}{socket_path(self.run_dir, f'{CONTROLLER}-{index}')}"
            for index, port in enumerate(self.ports)
        ]

    def controller(self, index: int) -> ChildSpec:
        arguments = ["--port", str(self.ports[index])]
        if self.master:
            arguments += ["--advertise", self.master]
        spec = self._spec(f"{CONTROLLER}-{index}", CONTROLLER, CONTROLLER, arguments)
        return replace(spec, address=self.addresses[index])

    def worker(self, pool: str, index: int) -> ChildSpec:
        arguments = ["--controllers", ",".join(self.addresses)]
        if scorer := scorer_of(pool):
            arguments += ["--scorer", scorer]
        spec = self._spec(worker_name(pool, index), pool, f"{role_of(pool)}_worker", arguments)
        return replace(spec, nice=WORKER_NICE)

    def rank(self, name: str) -> ChildSpec:
        """Spec of a rank above 0, which has the command line of its replica."""
        spec = self.worker(POLICY, worker_index(replica_of(name)))
        return replace(spec, name=name, role=RANK, log=spec.log.with_name(f"{name}.log"))

    def _spec(self, name: str, role: str, module: str, arguments: Sequence[str]) -> ChildSpec:
        common = ("--run-dir", str(self.run_dir), "--id", name)
        return ChildSpec(
            name=name,
            role=role,
            argv=(*python_module(module), str(self.config_path), *common, *arguments),
            environment=_environment(),
            log=self.run_dir / "logs" / f"{name}.log",
        )


def controller_ports(config: Config) -> list[int]:
    """The configured port and those after it, or free ones, which a restarted controller keeps. 0:
    a Unix socket, on one machine."""
    first, count = config.controller.port, config.fleet.controllers
    if first:
        return [first + index for index in range(count)]
    if is_loopback(config.controller.host):
        return [0] * count
    return free_ports(bindable(config.controller.host), count)


def _environment() -> dict[str, str]:
    # Processes that each use a thread pool of all cores slow one another down. Workers replace
    # these numbers by those of the configuration.
    pinned = dict.fromkeys(THREAD_VARIABLES, "1")
    output = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**without_place(os.environ), **pinned, **output}
