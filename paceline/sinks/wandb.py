"""Curves as a Weights & Biases run, online or in its offline files.

Online, the service knows the place of the last point. A dead leader's own upload may still be under
way then, so every point has its fixed W&B step: written by two, it is still one. Offline each leader
makes a directory of its own with the same run id, which ``wandb sync`` joins, and the last place is
in a file beside them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.sinks.base import ExternalRun, Point

PLACE = "paceline/place"


class WandbSink:
    def __init__(self, run: ExternalRun) -> None:
        import wandb

        logging.getLogger("wandb").setLevel(logging.WARNING)
        self._wandb: Any = wandb
        self._run = run
        self._offline = run.options.wandb_mode == "offline"
        self._place_file = run.directory / "wandb" / "paceline-place.json"
        self._session: Any = None

    def open(self) -> str | None:
        directory = self._run.directory
        directory.mkdir(parents=True, exist_ok=True)
        options = self._run.options
        self._session = self._wandb.init(
            id=self._run.id,
            name=self._run.name,
            project=options.project,
            entity=options.wandb_entity,
            config=dict(self._run.settings),
            dir=str(directory),
            mode=options.wandb_mode,
            resume=None if self._offline else "allow",
            reinit="create_new",
            # The controller's output, sources and machine are nobody's business here.
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
        if self._offline:
            return _read_place(self._place_file, self._run.id)
        place = self._session.summary.get(PLACE)
        return str(place) if place else None

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            row = {**point.curves, "step": point.step, "version": point.version}
            self._session.log({**row, PLACE: point.place}, step=point.number, commit=True)
        if self._offline:
            _write_place(self._place_file, self._run.id, points[-1].place)

    def close(self, outcome: str | None) -> None:
        if self._session is not None:
            self._session.finish(exit_code=1 if outcome == "failed" else 0)


def _read_place(path: Path, run_id: str) -> str | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return str(found["place"]) if found.get("id") == run_id else None


def _write_place(path: Path, run_id: str, place: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({"id": run_id, "place": place}))
    partial.replace(path)
