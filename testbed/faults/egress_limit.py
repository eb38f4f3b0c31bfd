"""Limit on what this process sends over the tensor plane, in the transport: for tests and
measurements.

All sends of a process share one line of a fixed rate, in the order in which they begin. A message
is under way for its size over the rate, and arrives as a whole after that: the time of a
store-and-forward network, at a grain of one bucket of weights. ``PACELINE_EGRESS_MB_S`` has no
effect on a process that does not call ``limit_from_environment()``.
"""

import os
import socket
import threading
import time
from typing import Any

from torch import Tensor

from paceline.mesh.gloo_backend import GlooBackend, Handle

VARIABLE = "PACELINE_EGRESS_MB_S"
"""Rate in 10**6 bytes a second."""
BURST_BYTES = 1 << 20
"""What a process that sent nothing for a moment may send at once, as of any token bucket: a process
that the machine's other work holds up for 20 ms makes up for it."""
_SO_MAX_PACING_RATE = 47
"""Linux; the socket module does not name it."""


class EgressLimit:
    """``sent_bytes``: of all messages so far."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self.sent_bytes = 0

    def wait(self, size: int) -> None:
        """Returns once a message of ``size`` bytes has left."""
        with self._lock:
            self.sent_bytes += size
            earliest = time.monotonic() - BURST_BYTES / self._bytes_per_s
            self._free_at = max(self._free_at, earliest) + size / self._bytes_per_s
            mine = self._free_at
        time.sleep(max(0.0, mine - time.monotonic()))

    def install(self) -> None:
        """From here on, for every mesh of this process."""

        def send(backend: GlooBackend, buffer: Tensor, peer: int) -> Handle:
            def post() -> Any:
                # On the thread of the sends: as for a slow network, nothing else waits.
                self.wait(buffer.nbytes)
                return backend._group.send([buffer], peer, 0)

            return backend._sends.start(post)

        GlooBackend.send = send  # type: ignore[method-assign]


def limit_from_environment() -> EgressLimit | None:
    """Of the rate in the environment; None: there is none."""
    if not (rate := os.environ.get(VARIABLE)):
        return None
    made = EgressLimit(float(rate) * 1e6)
    made.install()
    return made


def pace_sockets(bytes_per_s: int) -> None:
    """From here on each connection of this process sends at most so many bytes a second, in the
    kernel: a message is under way byte by byte, and can be cut in its middle."""
    form = GlooBackend.__init__

    def slow(backend: GlooBackend, *arguments: Any) -> None:
        form(backend, *arguments)
        for end in backend._sockets:
            with socket.socket(fileno=os.dup(end.descriptor)) as connection:
                connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)

    GlooBackend.__init__ = slow  # type: ignore[method-assign]
