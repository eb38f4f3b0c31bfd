"""Payload of a group, and the digests by which a reader knows that it is the group that was
accepted.

A worker submits the metadata of a group with the digest of its payload. The controller, which never
sees the payload, keeps both. A reader compares the bytes with the digest, and what it derives from
them with the metadata: a store that has lost or changed bytes and a worker that told other things
than its payload has are both found out.
"""

from __future__ import annotations

from hashlib import sha256

from paceline.v1 import rollout_pb2


def encode(group: rollout_pb2.Group) -> bytes:
    """The payload of ``group``."""
    return bytes(group.SerializeToString())


def decode(payload: bytes) -> rollout_pb2.Group:
    """The group in ``payload``. Raises google.protobuf's DecodeError."""
    group: rollout_pb2.Group = rollout_pb2.Group.FromString(payload)
    return group


def payload_digest(payload: bytes) -> str:
    """The first 128 bits of the SHA-256 of the bytes, 32 hexadecimal digits: processors have
    instructions for it."""
    return sha256(payload).hexdigest()[:32]
