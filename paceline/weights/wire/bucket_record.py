"""Bucket records: what precedes each bucket on a weights link, and says how it travels.

int64[3]   size of the delta that follows, or one of the words below;
           checksum of the whole bucket, in two halves
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.mesh.elastic_mesh import ProcessMesh

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
