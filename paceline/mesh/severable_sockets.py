"""Severable sockets: the TCP sockets of this process, found by descriptor because gloo hides its
own.

Only shutting a collective's connected sockets frees a thread that is blocked in gloo. A listening
socket must never be shut: gloo ends the process then. It ends it as well once no file can be opened
for one more connection, which it would keep for ever: a listener admits nobody who comes later.
"""

import contextlib
import ctypes
import os
import select
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

Address = tuple[str, int]

_TCP = (socket.AF_INET, socket.AF_INET6)
_DESCRIPTORS = Path("/proc/self/fd") if Path("/proc/self/fd").is_dir() else Path("/dev/fd")


_NOTHING = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
_FILTER = 26, struct.pack("HP", 1, ctypes.addressof(_NOTHING))
"""Option SO_ATTACH_FILTER, and the program of one instruction that keeps 0 bytes of a packet."""


@dataclass(frozen=True, slots=True)
class SocketId:
    """One open socket. The inode distinguishes it from a later one with the same descriptor."""

    descriptor: int
    inode: int


def listeners() -> dict[SocketId, Address]:
    """Listening TCP sockets of this process and the addresses they are bound to."""
    return {s: local for s, listening, local, _ in _tcp_sockets() if listening}


def admit_no_more(listening: Collection[SocketId]) -> None:
    """Has the kernel drop, as a firewall does, who connects from now on. Connections stay."""
    for wanted in listening:
        if (end := _duplicate(wanted.descriptor)) is not None:
            with end, contextlib.suppress(OSError):  # a system without such filters
                end.setsockopt(socket.SOL_SOCKET, *_FILTER)


def connected_via(addresses: Collection[Address]) -> list[SocketId]:
    """Connected TCP sockets of this process with one of ``addresses`` at either end."""
    return [
        s
        for s, listening, local, remote in _tcp_sockets()
        if not listening and remote is not None and (local in addresses or remote in addresses)
    ]


def shut(sockets: Collection[SocketId]) -> None:
    """Ends both directions of each that is still open. Never blocks."""
    for wanted in sockets:
        end = _duplicate(wanted.descriptor)
        if end is None:
            continue
        # Checked on the duplicate: the original may be closed and its number reused at any moment.
        with end:
            if os.fstat(end.fileno()).st_ino == wanted.inode:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def any_closed(sockets: Collection[SocketId]) -> bool:
    """True if the other end of one of these connections has gone. Never blocks."""
    # One connection may be listed twice: another thread that looked for sockets at the same time
    # held a second descriptor of it for a moment.
    present = [connection for connection in sockets if _is_open(connection)]
    if {connection.inode for connection in sockets} - {connection.inode for connection in present}:
        return True
    poll = select.poll()
    for connection in present:
        poll.register(connection.descriptor, select.POLLRDHUP)
    ended = {descriptor for descriptor, _ in poll.poll(0)}
    return any(c.descriptor in ended and _is_open(c) for c in present)


def _is_open(wanted: SocketId) -> bool:
    try:
        return os.fstat(wanted.descriptor).st_ino == wanted.inode
    except OSError:
        return False


def _tcp_sockets() -> list[tuple[SocketId, bool, Address, Address | None]]:
    found = []
    for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208
        end = _duplicate(int(name))
        if end is None:
            continue
        with end:
            if end.type != socket.SOCK_STREAM or end.family not in _TCP:
                continue
            inode = os.fstat(end.fileno()).st_ino
            try:
                listening = bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
                local = end.getsockname()[:2]
                remote = None if listening else end.getpeername()[:2]
            except OSError:
                # Not connected (any more).
                continue
            found.append((SocketId(int(name), inode), listening, local, remote))
    return found


def _duplicate(descriptor: int) -> socket.socket | None:
    try:
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:  # no socket
        os.close(copy)
        return None
