"""Frames: JSON messages between the two ends of a weights link, with a limit on their size."""

from __future__ import annotations

import json
from typing import Any

import torch

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.wire.weight_manifest import WeightsRefused


def send_frame(mesh: ProcessMesh, value: dict[str, Any], peer: int) -> None:
    raw = bytearray(json.dumps(value, separators=(",", ":")).encode())
    send_size(mesh, len(raw), peer)
    mesh.send(torch.frombuffer(raw, dtype=torch.uint8), peer)


def recv_frame(mesh: ProcessMesh, peer: int, limit: int) -> dict[str, Any]:
    """Raises WeightsRefused if the message is larger than ``limit`` bytes or no JSON object."""
    size = recv_size(mesh, peer)
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


def send_size(mesh: ProcessMesh, size: int, peer: int) -> None:
    mesh.send(torch.tensor([size], dtype=torch.int64), peer)


def recv_size(mesh: ProcessMesh, peer: int) -> int:
    """Receives a size as sent: to be checked before anything is allocated for it."""
    size = torch.zeros(1, dtype=torch.int64)
    mesh.recv(size, peer)
    return int(size.item())
