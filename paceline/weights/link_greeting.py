"""Greeting of a weights link: the receiver's hello and its acknowledgements, with the version of the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.arriving_weights import ArrivingWeights, Begun
from paceline.weights.frames import recv_frame, send_frame
from paceline.weights.receiver_base import ReceiverBase
from paceline.weights.weight_manifest import WeightsRefused

PUBLISHER, RECEIVER = 0, 1
"""Ranks in the mesh of a link."""
PROTOCOL = 3
SMALL_FRAME = 64 << 10


@dataclass(frozen=True)
class Hello:
    """State of the receiver when the link is formed."""

    version: int
    """-1 for none."""
    base: str = ""
    """Fingerprint of the base that it holds; empty for none."""
    begun: Begun | None = None
    """What it has of a version that is not complete."""


def say_hello(
    mesh: ProcessMesh,
    version: int,
    base: ReceiverBase | None = None,
    begun: ArrivingWeights | None = None,
) -> None:
    """Receiver: sends the version that it already has, -1 for none, the base that it holds, and what it has of
    a transfer that broke off."""
    hello: dict[str, Any] = {"protocol": PROTOCOL, "version": version}
    hello["base"] = "" if base is None else base.fingerprint
    if begun is not None:
        part = begun.begun
        hello["begun"] = [part.version, part.buckets, part.fingerprint]
    send_frame(mesh, hello, PUBLISHER)


def await_hello(mesh: ProcessMesh) -> Hello:
    """Publisher: what the receiver has. A receiver of another protocol is told so before WeightsRefused is raised."""
    hello = recv_frame(mesh, RECEIVER, SMALL_FRAME)
    if hello.get("protocol") != PROTOCOL:
        why = other_protocol("receiver", hello.get("protocol"), "publisher")
        send_frame(mesh, {"protocol": PROTOCOL, "refused": why}, RECEIVER)
        raise WeightsRefused(why)
    return Hello(version_in(hello), str(hello.get("base", "")), _begun(hello.get("begun")))


def other_protocol(other: str, protocol: Any, this: str) -> str:
    return (
        f"the {other} speaks version {protocol!r} of the weights protocol, the {this} version {PROTOCOL}: "
        "run the same release of Paceline on all workers"
    )


def _begun(value: Any) -> Begun | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 3:
        raise WeightsRefused("what the receiver has begun is malformed")
    version, buckets, held = value
    if not isinstance(buckets, int) or isinstance(buckets, bool) or buckets < 0:
        raise WeightsRefused("what the receiver has begun is malformed")
    return Begun(version_in({"version": version}), buckets, str(held))


def acknowledge(mesh: ProcessMesh, version: int) -> None:
    """Receiver: version is staged, and the next one may be sent."""
    send_frame(mesh, {"version": version}, PUBLISHER)


def await_acknowledgement(mesh: ProcessMesh) -> int:
    """Publisher: the version that the receiver has staged."""
    return version_in(recv_frame(mesh, RECEIVER, SMALL_FRAME))


def version_in(message: dict[str, Any]) -> int:
    version = message.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not -1 <= version < 1 << 62:
        raise WeightsRefused(f"{version!r} is no version")
    return version
