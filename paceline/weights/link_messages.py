"""Messages between the two ends of a weights link: JSON with a limit on its size, and the records
that precede buckets.

    hello {version} ──►  ◄── welcome {sources}       the receiver then connects to the others, one
                                                     for each rank of the replica that publishes
    ask {version, publication, buckets that are here, base that is here}  ──►
                      ◄── answer {ready, kept, base}       it may say "waits" first
    go {true}  ──►  the source sends            go {false} ──►  not this version, then
    ack {version} ──►
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.weight_manifest import WeightsRefused, is_count

PUBLISHER, RECEIVER = 0, 1
PROTOCOL = 5
_SMALL_FRAME = 64 << 10
_ASK_FRAME = 16 << 20
_MOST_SOURCES = 4096


def send_frame(mesh: ProcessMesh, value: dict[str, Any], peer: int) -> None:
    raw = bytearray(json.dumps(value, separators=(",", ":")).encode())
    mesh.send(torch.tensor([len(raw)], dtype=torch.int64), peer)
    mesh.send(torch.frombuffer(raw, dtype=torch.uint8), peer)


def recv_frame(mesh: ProcessMesh, peer: int, limit: int = _SMALL_FRAME) -> dict[str, Any]:
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
    except (ValueError, RecursionError) as error:
        raise WeightsRefused("a message is not JSON") from error
    if not isinstance(value, dict):
        raise WeightsRefused("a message is not a JSON object")
    return value


# ---- once a link


def say_hello(mesh: ProcessMesh, version: int) -> int:
    """Receiver: sends the version that it has, -1 for none. Returns the number of sources."""
    send_frame(mesh, {"protocol": PROTOCOL, "version": version}, PUBLISHER)
    welcome = recv_frame(mesh, PUBLISHER)
    if refused := welcome.get("refused"):
        raise WeightsRefused(str(refused)[:500])
    check_protocol(welcome, "publisher", "receiver")
    sources = welcome.get("sources")
    if not is_count(sources) or not 0 < sources < _MOST_SOURCES:
        raise WeightsRefused(f"{sources!r} is no number of sources")
    return sources


def await_hello(mesh: ProcessMesh, sources: int = 1) -> int:
    """Publisher: the version that the receiver has, and tells it the number of sources. A receiver
    of another protocol is told so before WeightsRefused is raised."""
    hello = recv_frame(mesh, RECEIVER)
    try:
        check_protocol(hello, "receiver", "publisher")
    except WeightsRefused as error:
        send_frame(mesh, {"protocol": PROTOCOL, "refused": str(error)}, RECEIVER)
        raise
    send_frame(mesh, {"protocol": PROTOCOL, "sources": sources}, RECEIVER)
    return version_in(hello)


def check_protocol(message: dict[str, Any], other: str, this: str) -> None:
    """Raises WeightsRefused if the ``other`` end speaks another protocol than ``this`` one."""
    if (protocol := message.get("protocol")) != PROTOCOL:
        raise WeightsRefused(
            f"the {other} speaks version {protocol!r} of the weights protocol, the {this} version "
            f"{PROTOCOL}: run the same release of Paceline on all workers"
        )


def version_in(message: dict[str, Any]) -> int:
    version = message.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not -1 <= version < 1 << 62:
        raise WeightsRefused(f"{version!r} is no version")
    return version


def publication_in(message: dict[str, Any]) -> int:
    publication = message.get("publication")
    if not is_count(publication):
        raise WeightsRefused(f"{publication!r} is no publication")
    return publication


# ---- once a version


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


def recv_ask(mesh: ProcessMesh) -> Ask | bool:
    """Source: what the receiver asks for; a bool: whether it is to be sent."""
    message = recv_frame(mesh, RECEIVER, _ASK_FRAME)
    if "go" in message:
        return message["go"] is True
    have = message.get("have")
    if not isinstance(have, list) or not all(map(is_count, have)) or have != sorted(set(have)):
        raise WeightsRefused("what the receiver has begun is malformed")
    texts = (str(message.get(name, "")) for name in ("have_fingerprint", "base"))
    return Ask(version_in(message), publication_in(message), tuple(have), *texts)


def send_answer(mesh: ProcessMesh, answer: Answer | None) -> None:
    """Source: its answer; None: it waits, and lives."""
    send_frame(mesh, {"waits": True} if answer is None else asdict(answer), RECEIVER)


def recv_answer(mesh: ProcessMesh) -> Answer | None:
    """Receiver: the source's answer; None: it waits, and lives."""
    message = recv_frame(mesh, PUBLISHER)
    if message.get("waits") is True:
        return None
    flags: Sequence[Any] = [message.get(name) for name in ("ready", "kept", "base")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise WeightsRefused("a source's answer is malformed")
    return Answer(*flags)


def acknowledge(mesh: ProcessMesh, version: int) -> None:
    """Receiver: version is staged, and the next one may be sent."""
    send_frame(mesh, {"version": version}, PUBLISHER)


# ---- once a bucket

WHOLE = 0
"""The whole bucket follows."""
ENDS = -(1 << 40)
"""The sender will never have the rest of this version. The header of another one follows."""
PATIENCE = ENDS - 1
"""Nothing follows yet: the sender lives and waits for its own source."""

_HALF = 8


def send_record(mesh: ProcessMesh, size: int, checksum: str = "0" * (4 * _HALF)) -> None:
    """Source: how the next bucket travels, int64[3]: ``size`` of the delta that follows, or one of
    the words above; ``checksum`` of the whole bucket, in two halves."""
    raw = bytes.fromhex(checksum)
    halves = [int.from_bytes(raw[i : i + _HALF], "little", signed=True) for i in (0, _HALF)]
    mesh.send(torch.tensor([size, *halves], dtype=torch.int64), RECEIVER)


def recv_record(mesh: ProcessMesh) -> tuple[int, str]:
    """Receiver: size as sent, to be checked before anything is allocated for it, and checksum."""
    values = torch.zeros(3, dtype=torch.int64)
    mesh.recv(values, PUBLISHER)
    size, *halves = (int(value) for value in values)
    raw = b"".join(half.to_bytes(_HALF, "little", signed=True) for half in halves)
    return size, raw.hex()
