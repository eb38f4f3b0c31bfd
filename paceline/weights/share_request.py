"""Requests for shares of a version: what a receiver asks of each source of a link, and what the
source answers.

ask {version, publication, buckets that are here, base that is here}  ──►
                      ◄── answer {ready, kept, base, direct}       it may say "waits" first
go {true}  ──►  the source sends            go {false} ──►  not this version, then
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.frames import recv_frame, send_frame
from paceline.weights.link_greeting import PUBLISHER, RECEIVER, SMALL_FRAME, version_in
from paceline.weights.weight_manifest import WeightsRefused, is_count

_ASK_FRAME = 16 << 20


@dataclass(frozen=True)
class Ask:
    version: int
    publication: int
    have: tuple[int, ...] = ()
    have_fingerprint: str = ""
    base: str = ""
    """Fingerprint of its base over the share; empty for none."""


@dataclass(frozen=True)
class Answer:
    ready: bool = False
    """The source has the version, or will have all of it soon. If not, it will never have it."""
    kept: bool = False
    """The receiver's buckets are the same here, and are not sent again."""
    base: bool = False
    """Buckets may come as deltas to the base that the receiver named."""
    direct: bool = False


def send_ask(mesh: ProcessMesh, ask: Ask) -> None:
    send_frame(mesh, asdict(ask), PUBLISHER)


def send_go(mesh: ProcessMesh, go: bool) -> None:
    """Receiver: has the source send what it answered last, or tells it that this version is not
    asked for any more."""
    send_frame(mesh, {"go": go}, PUBLISHER)


def recv_ask(mesh: ProcessMesh) -> Ask | bool:
    """Source: what the receiver asks for; a bool: what send_go() was given."""
    message = recv_frame(mesh, RECEIVER, _ASK_FRAME)
    if "go" in message:
        return message["go"] is True
    have, publication = message.get("have"), message.get("publication")
    if not isinstance(have, list) or not all(map(is_count, have)) or have != sorted(set(have)):
        raise WeightsRefused("what the receiver has begun is malformed")
    if not is_count(publication):
        raise WeightsRefused(f"{publication!r} is no publication")
    texts = (str(message.get(name, "")) for name in ("have_fingerprint", "base"))
    return Ask(version_in(message), publication, tuple(have), *texts)


def send_answer(mesh: ProcessMesh, answer: Answer | None) -> None:
    """Source: its answer; None: it waits, and lives."""
    if answer is None:
        send_frame(mesh, {"waits": True}, RECEIVER)
        return
    send_frame(mesh, asdict(answer), RECEIVER)


def recv_answer(mesh: ProcessMesh) -> Answer | None:
    """Receiver: the source's answer; None: it waits, and lives."""
    message = recv_frame(mesh, PUBLISHER, SMALL_FRAME)
    if message.get("waits") is True:
        return None
    flags: Sequence[Any] = [message.get(name) for name in ("ready", "kept", "base", "direct")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise WeightsRefused("a source's answer is malformed")
    return Answer(*flags)
