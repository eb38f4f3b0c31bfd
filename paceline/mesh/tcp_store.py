"""torch's TCPStore on one address.

Whoever connects to a store reads and writes all of its values; there is no password. Given a host
name, TCPStore nevertheless listens on every interface of the machine. Here it gets a socket that is
bound already.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

BACKLOG = 128


def host_store(
    host: str, timeout: timedelta, size: int | None = None, *, port: int = 0
) -> dist.TCPStore:
    """A store whose server listens on ``port`` (0: a free one) of ``host`` and of no other address.
    ``size``: number of the processes that will use it, if known. Raises OSError if the port is
    taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    port = listener.getsockname()[1]
    # The store owns the socket from here on, and closes it.
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
