"""Curves as a Weights & Biases run, online or in its offline files.

W&B takes points in a process of its own and writes them when it sees fit: what a leader that was
killed had handed over may be there or not. So the place of the last point is looked up where the
points are, with the service or in the files; and every point has its fixed W&B step, so that one
that arrives late, after the next leader has sent it again, is still one point.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.sinks.base import ExternalRun, Point, key_of

PLACE = "paceline/place"
BLOCK = 32768
HEAD = 7
WHOLE, LAST_PART = 1, 4
LAST = 4096
"""Records of a file among which its last point is looked for."""


class WandbSink:
    def __init__(self, run: ExternalRun) -> None:
        import wandb

        logging.getLogger("wandb").setLevel(logging.WARNING)
        self._wandb: Any = wandb
        self._run = run
        self._offline = run.options.wandb_mode == "offline"
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
            return last_offline_place(directory / "wandb", self._run.id)
        place = self._session.summary.get(PLACE)
        return str(place) if place else None

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            row = {**point.curves, "step": point.step, "version": point.version}
            self._session.log({**row, PLACE: point.place}, step=point.number, commit=True)

    def close(self, outcome: str | None) -> None:
        try:
            if self._session is not None:
                self._session.finish(exit_code=1 if outcome == "failed" else 0)
        finally:
            # Ends W&B's process: it writes what it has, and lets go of the run's id.
            self._wandb.teardown()


def last_offline_place(directory: Path, run_id: str) -> str | None:
    """Place of the last point in the offline files of that run; None where there is none."""
    found = [
        place
        for path in directory.glob(f"offline-run-*/run-{run_id}.wandb")
        if (place := _last_place(path)) is not None
    ]
    return max(found, key=key_of, default=None)


def _last_place(path: Path) -> str | None:
    from wandb.proto.wandb_internal_pb2 import Record

    for data in reversed(deque(records(path), maxlen=LAST)):
        for item in Record.FromString(data).history.item:
            if item.key == PLACE or "/".join(item.nested_key) == PLACE:
                return str(json.loads(item.value_json))
    return None


def records(path: Path) -> Iterator[bytes]:
    """The complete records of an offline file: LevelDB's log format behind a head of 7 bytes."""
    data = path.read_bytes()
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        if BLOCK - at % BLOCK < HEAD:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        at += HEAD + length
        if kind == 0 or at > len(data):
            return
        parts += data[at - length : at]
        if kind in (WHOLE, LAST_PART):
            yield parts
            parts = b""
