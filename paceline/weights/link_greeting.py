"""Greeting of a weights link: the receiver's hello and the publisher's welcome, with the version of
the protocol.

The welcome says how many sources the link has: one for each rank of the replica that publishes. The
receiver connects to the others after it.
"""

from __future__ import annotations

from typing import Any

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.frames import recv_frame, send_frame
from paceline.weights.weight_manifest import WeightsRefused, is_count

PUBLISHER, RECEIVER = 0, 1
PROTOCOL = 4
SMALL_FRAME = 64 << 10
_MOST_SOURCES = 4096


def say_hello(mesh: ProcessMesh, version: int) -> int:
    """Receiver: sends the version that it already has, -1 for none. Returns the number of the
    link's sources."""
    send_frame(mesh, {"protocol": PROTOCOL, "version": version}, PUBLISHER)
    welcome = recv_frame(mesh, PUBLISHER, SMALL_FRAME)
    if refused := welcome.get("refused"):
        raise WeightsRefused(str(refused)[:500])
    if welcome.get("protocol") != PROTOCOL:
        raise WeightsRefused(other_protocol("publisher", welcome.get("protocol"), "receiver"))
    sources = welcome.get("sources")
    if not is_count(sources) or not 0 < sources < _MOST_SOURCES:
        raise WeightsRefused(f"{sources!r} is no number of sources")
    return sources


def await_hello(mesh: ProcessMesh, sources: int = 1) -> int:
    """Publisher: the version that the receiver has, and tells it the number of sources. A receiver
    of another protocol is told so before WeightsRefused is raised."""
    hello = recv_frame(mesh, RECEIVER, SMALL_FRAME)
    if hello.get("protocol") != PROTOCOL:
        why = other_protocol("receiver", hello.get("protocol"), "publisher")
        send_frame(mesh, {"protocol": PROTOCOL, "refused": why}, RECEIVER)
        raise WeightsRefused(why)
    send_frame(mesh, {"protocol": PROTOCOL, "sources": sources}, RECEIVER)
    return version_in(hello)


def other_protocol(other: str, protocol: Any, this: str) -> str:
    return (
        f"the {other} speaks version {protocol!r} of the weights protocol, the {this} version "
        f"{PROTOCOL}: run the same release of Paceline on all workers"
    )


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
