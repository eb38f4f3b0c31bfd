"""Curves as TensorBoard event files, in ``<run_dir>/tensorboard`` or a directory of many runs.

They are written without a deep-learning framework: the controller must start in about a second, and
tensorboardX and torch's own writer import torch. The format is a sequence of records: length,
masked CRC-32C of the length, a protobuf ``Event``, masked CRC-32C of the event.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import google_crc32c

from paceline.observe.sinks.base import ExternalRun, Point


class TensorBoardSink:
    """Event file of each leader; a file beside them has the number of the last point."""

    def __init__(self, run: ExternalRun) -> None:
        self._directory = directory_of(run)
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


def directory_of(run: ExternalRun) -> Path:
    """A fresh run of the same name gets a directory of its own, as its id is another."""
    if run.options.tensorboard_dir is None:
        return run.directory / "tensorboard"
    return Path(run.options.tensorboard_dir) / f"{run.name}-{run.id[-8:]}"


class EventFile:
    """A new event file in ``directory``; every ``scalars`` call is in it when it returns."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab", buffering=0)
        self._write(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def scalars(self, step: int, t: float, values: Mapping[str, float]) -> None:
        """Appends one point at ``step`` (time ``t``, unix seconds) to the curve of each tag."""
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()
        )
        self._write(_double(1, t) + _varint(2 << 3) + _varint(step) + _bytes(5, summary))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        crcs = (struct.pack("<I", _masked_crc(data)) for data in (length, event))
        self._file.write(length + next(crcs) + event + next(crcs))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _masked_crc(data: bytes) -> int:
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
