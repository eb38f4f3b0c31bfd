"""Curves as TensorBoard event files in ``<run_dir>/tensorboard``."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sinks.base import ExternalRun, Point
from paceline.sinks.tensorboard_writer import EventFile, last_place


class TensorBoardSink:
    """Each leader writes a file of its own; every event says which point it is, so none is repeated."""

    def __init__(self, run: ExternalRun) -> None:
        self._directory = run.directory / "tensorboard"
        self._file: EventFile | None = None

    def open(self) -> str | None:
        return last_place(self._directory)

    def write(self, points: Sequence[Point]) -> None:
        if self._file is None:
            self._file = EventFile(self._directory)
        for point in points:
            self._file.scalars(point.step, point.t, point.curves, place=point.place)

    def close(self, outcome: str | None) -> None:
        if self._file is not None:
            self._file.close()
