"""TensorBoard event files, written without importing a deep-learning framework.

The leader of the controllers writes them, and it must start in about a second: the usual writers
import torch where it is installed. The format is a sequence of records: length, masked CRC-32C of
the length, a protobuf ``Event``, masked CRC-32C of the event.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_PLACE = 1001
"""Field of ours in an event: which point of the run it is. Readers pass over fields they do not know."""


class EventFile:
    """One new event file in ``directory``; every ``scalars`` call is on disk when it returns."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("ab", buffering=0)
        self._write(_double(1, now) + _bytes(3, b"brain.Event:2"))

    def scalars(self, step: int, t: float, values: Mapping[str, float], *, place: str) -> None:
        """Appends one point at ``step`` (time ``t``, unix seconds) to the curve of each tag.

        ``place`` names the point, for ``last_place``.
        """
        summary = b"".join(
            _bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items()
        )
        head = _double(1, t) + _varint_field(2, step)
        self._write(head + _bytes(5, summary) + _bytes(_PLACE, place.encode()))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(
            length
            + struct.pack("<I", _masked_crc(length))
            + event
            + struct.pack("<I", _masked_crc(event))
        )


def last_place(directory: Path) -> str | None:
    """Place of the last point in the event files of ``directory``; None where there is none."""
    files = sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    for path in reversed(files):
        last = None
        for record in _records(path):
            last = _place_of(record) or last
        if last is not None:
            return last
    return None


def _records(path: Path) -> Iterator[bytes]:
    """The complete events of a file."""
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack_from("<Q", head)
            record = file.read(length)
            if len(record) < length or len(file.read(4)) < 4:
                return
            yield record


def _place_of(event: bytes) -> str | None:
    at = 0
    while at < len(event):
        key, at = _read_varint(event, at)
        kind = key & 7
        if kind == 0:
            _, at = _read_varint(event, at)
        elif kind == 1:
            at += 8
        elif kind == 5:
            at += 4
        else:
            length, at = _read_varint(event, at)
            if key >> 3 == _PLACE:
                return event[at : at + length].decode()
            at += length
    return None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _varint_field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _double(number: int, value: float) -> bytes:
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _float(number: int, value: float) -> bytes:
    return _varint(number << 3 | 5) + struct.pack("<f", value)


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
