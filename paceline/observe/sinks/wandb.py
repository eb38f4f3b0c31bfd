"""Curves as a Weights & Biases run, online or in its offline files."""

import logging
import os
from collections.abc import Sequence
from typing import Any

from paceline.observe.sinks.base import ExternalRun, Point


class WandbSink:
    """Each point's number is its fixed W&B step, so a point that is sent again is still one point.
    Online, the next leader continues after the last step that the service has. Offline, it writes
    the whole curve into a directory of its own: the newest offline directory is always complete."""

    def __init__(self, run: ExternalRun) -> None:
        import wandb

        logging.getLogger("wandb").setLevel(logging.WARNING)
        self._wandb: Any = wandb
        self._run = run
        self._session: Any = None

    def open(self) -> int | None:
        run = self._run
        offline = os.environ.get("WANDB_MODE") == "offline"
        run.directory.mkdir(parents=True, exist_ok=True)
        self._session = self._wandb.init(
            id=run.id,
            name=run.name,
            project=run.options.project,
            config=dict(run.settings),
            dir=str(run.directory),
            resume=None if offline else "allow",
            reinit="create_new",
            # The service gets curves and settings, not the controller's output, sources or machine.
            settings=self._wandb.Settings(
                console="off",
                silent=True,
                save_code=False,
                disable_git=True,
                x_disable_stats=True,
                x_disable_meta=True,
                x_save_requirements=False,
            ),
        )
        self._session.define_metric("step")
        self._session.define_metric("*", step_metric="step")
        return None if offline else int(self._session.starting_step) - 1

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            row = {**point.curves, "step": point.step, "version": point.version}
            self._session.log(row, step=point.number, commit=True)

    def close(self, outcome: str | None) -> None:
        try:
            if self._session is not None:
                self._session.finish(exit_code=1 if outcome == "failed" else 0)
        finally:
            # Ends W&B's own process, which then writes what it holds and releases the run's id.
            self._wandb.teardown()
