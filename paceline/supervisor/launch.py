"""Command line and environment of each process of a local fleet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from paceline.config.schema import Config
from paceline.process.user_code import python_module
from paceline.rpc.ports import bindable, free_ports
from paceline.supervisor.child import ChildSpec

WORKER_NICE = 5
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Launcher:
    """Makes the ``ChildSpec`` of any process of a run."""

    def __init__(
        self,
        config: Config,
        config_path: Path,
        run_dir: Path,
        ports: Sequence[int] | None = None,
    ) -> None:
        """``ports``: those of controllers that already run; default: chosen now."""
        self._config = config
        self._config_path = config_path
        self._run_dir = run_dir
        self.ports = list(ports) if ports else controller_ports(config)

    @property
    def addresses(self) -> list[str]:
        """Addresses of the controllers as seen from this machine."""
        return [f"{_reachable(self._config.controller.host)}:{port}" for port in self.ports]

    def controller(self, index: int) -> ChildSpec:
        return ChildSpec(
            name=f"controller-{index}",
            role="controller",
            argv=(
                *(*python_module("controller"), str(self._config_path)),
                *("--run-dir", str(self._run_dir), "--id", f"controller-{index}"),
                *("--port", str(self.ports[index])),
            ),
            environment=_environment(threads=1),
            log=self._log(f"controller-{index}"),
            address=self.addresses[index],
        )

    def worker(self, role: str, index: int) -> ChildSpec:
        """``role``: policy or rollout."""
        fleet = self._config.fleet
        threads = fleet.policy_threads if role == "policy" else fleet.rollout_threads
        name = f"{role}-{index}"
        return ChildSpec(
            name=name,
            role=role,
            argv=(
                *(*python_module(f"{role}_worker"), str(self._config_path)),
                *("--controllers", ",".join(self.addresses), "--id", name),
                *("--run-dir", str(self._run_dir)),
            ),
            environment=_environment(threads),
            log=self._log(name),
            nice=WORKER_NICE,
        )

    def _log(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"


def controller_ports(config: Config) -> list[int]:
    """The configured port and those after it, or free ones. A restarted controller keeps its port."""
    first, count = config.controller.port, config.fleet.controllers
    if first:
        return [first + index for index in range(count)]
    return free_ports(bindable(config.controller.host), count)


def _environment(threads: int) -> dict[str, str]:
    # Pinned: processes that each use a thread pool of all cores slow one another down.
    pinned = dict.fromkeys(THREAD_VARIABLES, str(threads))
    return {**os.environ, **pinned, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host
