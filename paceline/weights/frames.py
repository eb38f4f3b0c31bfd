"""Frames: JSON messages between the two ends of a weights link, with a limit on their size; and
records, which precede each bucket and say how it travels.

int64[3]   size of the delta that follows, or one of the words below;
           checksum of the whole bucket, in two halves
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.weight_manifest import WeightsRefused


def send_frame(mesh: ProcessMesh, value: dict[str, Any], peer: int) -> None:
    raw = bytearray(json.dumps(value, separators=(",", ":")).encode())
    mesh.send(torch.tensor([len(raw)], dtype=torch.int64), peer)
    mesh.send(torch.frombuffer(raw, dtype=torch.uint8), peer)


def recv_frame(mesh: ProcessMesh, peer: int, limit: int) -> dict[str, Any]:
    """Raises WeightsRefused if the message is larger than ``limit`` bytes or no JSON object."""
    header = torch.zeros(1, dtype=torch.int64)
    mesh.recv(header, peer)
    size = int(header)
    if not 0 < size <= limit:
        raise WeightsRefused(f"a message of {size} bytes exceeds the limit of {limit}")
    raw = torch.empty(size, dtype=torch.uint8)
    mesh.recv(raw, peer)
    try:
        value = json.loads(raw.numpy().tobytes())
    except ValueError as error:
        raise WeightsRefused("a message is not JSON") from error
    if not isinstance(value, dict):
        raise WeightsRefused("a message is not a JSON object")
    return value


WHOLE = 0
"""The whole bucket follows."""
ENDS = -(1 << 40)
"""The sender will never have the rest of this version. The header of another one follows."""
PATIENCE = ENDS - 1
"""Nothing follows yet: the sender lives and waits for its own source."""

_HALF = 8
_NO_CHECKSUM = "0" * (4 * _HALF)


@dataclass(frozen=True)
class BucketRecord:
    size: int
    """Size as sent: to be checked before anything is allocated for it."""
    checksum: str = _NO_CHECKSUM


def send_record(mesh: ProcessMesh, record: BucketRecord, peer: int) -> None:
    raw = bytes.fromhex(record.checksum)
    halves = [int.from_bytes(raw[i : i + _HALF], "little", signed=True) for i in (0, _HALF)]
    mesh.send(torch.tensor([record.size, *halves], dtype=torch.int64), peer)


def recv_record(mesh: ProcessMesh, peer: int) -> BucketRecord:
    values = torch.zeros(3, dtype=torch.int64)
    mesh.recv(values, peer)
    size, *halves = (int(value) for value in values)
    raw = b"".join(half.to_bytes(_HALF, "little", signed=True) for half in halves)
    return BucketRecord(size, raw.hex())
