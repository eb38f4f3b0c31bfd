"""Curves as TensorBoard event files in ``<run_dir>/tensorboard``."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.sinks.base import ExternalRun, Point
from paceline.sinks.tensorboard_writer import EventFile


class TensorBoardSink:
    """Each leader writes an event file of its own; a file beside them has the last point's number."""

    def __init__(self, run: ExternalRun) -> None:
        self._directory = run.directory / "tensorboard"
        self._last = self._directory / "last_point"
        self._file: EventFile | None = None

    def open(self) -> int | None:
        text = self._last.read_text() if self._last.exists() else ""
        return int(text) if text.isdecimal() else None

    def write(self, points: Sequence[Point]) -> None:
        if self._file is None:
            self._file = EventFile(self._directory)
        for point in points:
            self._file.scalars(point.step, point.t, point.curves)
        self._last.write_text(str(points[-1].number))

    def close(self, outcome: str | None) -> None:
        if self._file is not None:
            self._file.close()
