"""Page and REST interface of a run that is over, from its run directory.

    config.toml, events.jsonl ──► projection, a ledger's state without tasks ──┐
    samples/*.parquet ─────────────────────────────────────────────────────────┴──► REST, page

Nothing leads, nothing is followed, and nothing is written.
"""

import math
import os
import socket
from pathlib import Path
from typing import Any

from controller.context import ControllerContext
from controller.ledger import Ledger
from controller.ledger.enums import Phase
from controller.replicated_controller import Controller
from controller.rest.app import Rest
from controller.rest.server import bind
from controller.store.journal import Position
from controller.store.ledger_follower import LedgerFollower
from paceline.config.load import load_config
from paceline.errors import BadInput
from paceline.ids import Step, Version
from paceline.masking import Redactor
from paceline.observe.projection import Projection
from paceline.observe.run_files import DamagedFile
from paceline.redis.leader_lease import LeaderIdentity
from paceline.rpc.addresses import free_ports
from paceline.rpc.http_server import http_server

HOST = "127.0.0.1"
PHASES = {"finished": Phase.FINISHED, "failed": Phase.FAILED}
"""Phases of runs that no later fleet can go on with."""


class Nowhere:
    """Stores of a run whose controllers have ended: what is not archived is gone."""

    url = ""
    journal = None

    @property
    def payloads(self) -> "Nowhere":
        return self

    async def get(self, *refs: Any) -> None:
        return None


def past_controller(run_dir: Path) -> Controller:
    """A controller that stands where the run ended. Raises BadInput and ConfigError."""
    config = load_config(run_dir / "config.toml")
    try:
        run = Projection.read(run_dir, Redactor(run_dir).value)
    except (DamagedFile, OSError) as error:
        raise BadInput(f"the events of {run_dir} cannot be read: {error}") from error
    stores: Any = Nowhere()
    identity = LeaderIdentity("its run directory", "", socket.gethostname(), os.getpid(), "past")
    context = ControllerContext(config, run_dir, identity, stores)
    context.projector.hold(run)
    controller = Controller(context)
    controller.trouble = ""
    controller.replica = LedgerFollower(_ledger_of(run), Position())
    return controller


def _ledger_of(run: Projection) -> Ledger:
    ledger, history = Ledger(), run.history
    state = ledger.state
    state.phase, state.reason = PHASES.get(run.status, Phase.SUSPENDED), run.reason
    state.versions.step = Step(run.step)
    ends = history.after(None, limit=1, newest=False), history.after(None, limit=1, newest=True)
    state.started_t, state.ended_t = (found[0].t if found else 0.0 for found in ends)
    if rows := run.newest_steps(1):
        state.versions.version = Version(int(rows[-1]["version"]))
        state.steps.metrics = {
            name: float(value)
            for name, value in rows[-1].items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
    state.steps.samples_trained, state.steps.tokens_trained = (
        int(sum(value for _, value in run.metrics.column(name))) for name in ("samples", "tokens")
    )
    return ledger


async def serve_past_run(run_dir: Path, door: socket.socket, *, token: str) -> None:
    """Serves the page at the bound socket ``door`` until cancelled."""
    rest = Rest(past_controller(run_dir), token=token, loopback=True)
    await http_server(rest.asgi).serve(sockets=[door])


def bind_loopback(port: int) -> tuple[socket.socket, str]:
    """A socket on ``port`` (0: any) and the URL of the page there. Raises BadInput."""
    door = bind(HOST, [port] if port else free_ports(HOST, 1))
    return door, f"http://{HOST}:{door.getsockname()[1]}"
