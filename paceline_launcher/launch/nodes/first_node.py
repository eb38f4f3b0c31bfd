"""Node 0: a run as ``paceline up`` leads it, whose workers are on other nodes too.

It says in the run's directory that it has started, and how the run has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.load import changed_config
from paceline.config.schema import Config
from paceline.errors import UserError
from paceline.providers.base import Trouble
from paceline.providers.ray import RayProvider
from paceline.rpc.addresses import is_loopback
from paceline.rpc.auth import TOKEN_FILE, read_token
from paceline.rpc.client import ControlPlane
from paceline.v1 import admin_pb2
from paceline_launcher.launch.launch import Launcher
from paceline_launcher.launch.local import LocalFleet
from paceline_launcher.launch.node_environment import NodePlace
from paceline_launcher.launch.nodes.job_file import (
    NodeJob,
    RunOutcome,
    write_job,
    write_outcome,
)
from paceline_launcher.launch.nodes.node_fleet import NodeFleet
from paceline_launcher.launch.nodes.node_launcher import NodeLauncher, Share
from paceline_launcher.launch.up import LocalRun, Outcome

ANY_ADDRESS = "0.0.0.0"


def served_settings(config: Config, place: NodePlace, run_dir: Path) -> Config:
    """``config`` of node 0: its controllers and its Redis can be reached by the other nodes, on
    ports that these know.

    Without a configured token, the run's own one is asked for: every node reads it in the run's
    directory.
    """
    changes: dict[str, object] = {}
    if place.port:
        first = config.controller.port or place.port
        changes["controller.port"] = first
        if config.redis.url is None:
            changes["redis.port"] = config.redis.port or first + config.fleet.controllers
    if not is_loopback(place.master):
        if is_loopback(config.controller.host):
            changes["controller.host"] = ANY_ADDRESS
        if config.redis.url is None and is_loopback(config.redis.host):
            changes["redis.host"] = ANY_ADDRESS
        if read_token(config.auth) is None:
            changes["auth.token_file"] = str(run_dir / TOKEN_FILE)
    return changed_config(config, changes)


@dataclass(eq=False)
class FirstNode(LocalRun):
    """``config``: ``served_settings``."""

    place: NodePlace | None = None
    share: Share | None = None
    job: NodeJob | None = None

    async def run(self) -> Outcome:
        assert self.job is not None
        job = self.job
        write_job(self.run_dir, job)
        try:
            outcome = await super().run()
        except BaseException as error:
            code = error.exit_status if isinstance(error, UserError) else 1
            write_outcome(self.run_dir, RunOutcome(job.session, "failed", code, str(error)))
            raise
        finally:
            await self._release()
        reason = str(outcome.summary.get("reason") or "")
        ended = RunOutcome(job.session, outcome.status, outcome.exit_code, reason)
        write_outcome(self.run_dir, ended)
        return outcome

    async def _release(self) -> None:
        """Ray keeps the places of workers that have ended, and no leader gives them back any more."""
        if self.config.fleet.provider != "ray":
            return
        provider = RayProvider(self.config, str(self.run_dir), _no_drain)
        try:
            await provider.release()
        except Trouble as trouble:
            self.console.note(f"places on the Ray cluster are not given back: {trouble}")
        finally:
            await provider.close()

    def _launcher(self, config_path: Path, ports: Sequence[int]) -> Launcher:
        assert self.place is not None and self.share is not None
        host = self.place.master
        return NodeLauncher(self.config, config_path, self.run_dir, ports, host, self.share)

    def _new_fleet(self, launcher: Launcher, control: ControlPlane) -> LocalFleet:
        assert self.place is not None
        return NodeFleet(
            self.config,
            launcher,
            self.run_dir,
            control,
            self.console.note,
            self.earlier,
            share=self.share,
            address=self.place.master,
        )


async def _no_drain(worker: admin_pb2.WorkerStatus) -> None:
    """Nobody is asked to leave: the run has ended."""
