"""TLS in front of the embedded Redis, for workers on other machines.

    worker ── rediss://…?ssl_ca_data= ──► front (host:port, TLS) ──► Redis (Unix socket)

The server itself listens on its Unix socket alone. A worker learns the URL from the leader, with
the certificate in it, so its password goes to this process and to nobody who took the port over.
Nor can others do that once it has died: controllers hold the port. A connection whose first request
does not log in ends with it: strangers keep none. Beyond ``MOST_STRANGERS`` a new one takes the
place of the one that has waited longest. The server sees a connection once that request is whole,
and few at a time that it has not let in: its connections are the controllers' too.
"""

import asyncio
import contextlib
import re
import secrets
import socket
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.errors import BadInput
from paceline.process.files import open_files_limit, set_process_limits, write_private
from paceline.process.lifetime import recorded_process, started_s
from paceline.rpc.addresses import bound_socket, free_ports, is_loopback
from paceline.rpc.listeners import certificate_of
from paceline.user_code import python_module

FIRST_S = 10.0  # for the handshake, and for the first request
LOOK_S = 2.0
CHUNK = 1 << 18
BACKLOG = 256
RECORD = "front.pid"
"""File of the process, with its port at the end."""
LOGIN = re.compile(
    rb"\*\d+\r\n(\$4\r\nAUTH|\$5\r\nHELLO\r\n\$1\r\n[23]\r\n\$4\r\nAUTH)\r\n", re.IGNORECASE
)
MOST_STRANGERS = 1024  # Connections that have not logged in
MOST_LOGINS = 256
"""Connections at a time whose login the server has not answered."""
_COUNT = re.compile(rb"\*([2-9])\r\n")
_SIZE = re.compile(rb"\$(\d{1,3})\r\n")
_ENDED = OSError, EOFError, asyncio.LimitOverrunError
_held: dict[Path, socket.socket] = {}
"""By directory: a socket that does not listen, at the front's port. So only processes of this user
can listen there."""


@dataclass(frozen=True, slots=True)
class Front:
    port: int
    certificate: str  # PEM


def ensure_front(home: Path, host: str, port: int, server: Path, *, stays: bool) -> Front:
    """Finds or starts the front of the Redis in ``home``, whose socket is ``server``. ``port`` 0:
    that of the last start, or a free one. Raises BadInput if the port is taken. ``stays``: workers
    know the port of the last start; if that is taken, a later call starts the front. Only for
    callers that hold the lock of ``home``."""
    certificate, before = _certificate(home), _port(home)
    address = "127.0.0.1" if is_loopback(host) else host
    if front_process(home) is None:
        fixed = before if stays else 0
        with contextlib.suppress(*[BadInput] if fixed else []):
            before = _start(home, server, _listener(address, fixed or port, before))
    if home not in _held:
        with contextlib.suppress(OSError):
            _held[home] = bound_socket(address, before, shared=True)
    return Front(before, certificate)


def _start(home: Path, server: Path, listener: socket.socket) -> int:
    """Starts the front and returns its port."""
    with listener, (home / "front.log").open("ab") as log:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            listener.setsockopt(socket.SOL_SOCKET, option, 1)
        listener.listen(BACKLOG)
        child = subprocess.Popen(
            [*python_module("paceline.redis.tls_front"), str(home.resolve()), str(server)],
            stdin=listener.fileno(),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        bound = int(listener.getsockname()[1])
    write_private(home / RECORD, f"{child.pid} {started_s(child.pid)} {bound}\n")
    return bound


def end_front(home: Path) -> None:
    if (held := _held.pop(home, None)) is not None:
        held.close()
    if (front := front_process(home)) is not None:
        front.kill()


def front_trouble(home: Path) -> str:
    """The reason why nobody can reach the front; empty if it runs."""
    if front_process(home) is not None:
        return ""
    return (
        "the run's own Redis, whose listener for other machines has ended and starts again once "
        f"port {_port(home)} is free: end what listens there (ss -ltnp)"
    )


def front_process(home: Path) -> psutil.Process | None:
    return recorded_process(home / RECORD)


def _port(home: Path) -> int:
    """The port of the last front; 0 for none."""
    try:
        return int((home / RECORD).read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


def _certificate(home: Path) -> str:
    """The certificate; key and certificate are made at the first call."""
    path = home / "front.pem"
    if not path.exists():
        pair = certificate_of(1 + secrets.randbits(255))
        write_private(path, (pair.key + pair.certificate).decode())
    return path.read_text().partition("-----END PRIVATE KEY-----\n")[2]


def _listener(host: str, port: int, before: int) -> socket.socket:
    for number in [port] if port else [*filter(None, [before]), *free_ports(host, 1)]:
        if number == before:  # No stranger's, but another run of this user may listen there.
            with contextlib.suppress(OSError), socket.create_connection((host, number), 1.0):
                continue
        with contextlib.suppress(OSError):
            return bound_socket(host, number, shared=number == before)
    raise BadInput(
        f"redis.port: port {port} is in use on {host}: end what uses it (ss -ltnp), choose "
        "another, or 0 for a free port"
    )


async def _serve(listener: socket.socket, home: Path, server: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(home / "front.pem")
    turns = asyncio.Semaphore(MOST_LOGINS)
    most = min(MOST_STRANGERS, open_files_limit() // 4)
    strangers: dict[asyncio.Timeout, None] = {}  # in the order in which they came

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(strangers) >= most:
            oldest = next(iter(strangers))
            del strangers[oldest]
            with contextlib.suppress(RuntimeError):  # its time is over already
                oldest.reschedule(0.0)
        with contextlib.suppress(*_ENDED), contextlib.closing(writer):
            async with asyncio.timeout(FIRST_S) as limit:
                strangers[limit] = None
                try:
                    await writer.start_tls(context)
                    login = await _login(reader)
                finally:
                    strangers.pop(limit, None)
            if login:
                await _relay(login, reader, writer, server, turns)

    async with await asyncio.start_server(connected, sock=listener, limit=CHUNK):
        # Once its directory was removed nobody can find it, or end it, any more.
        while await asyncio.to_thread(home.exists):  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)


async def _login(reader: asyncio.StreamReader) -> bytes:
    """The whole first request; empty if it does not log in."""
    request = await reader.readuntil(b"\r\n")
    count = _COUNT.fullmatch(request)
    if count is None:
        return b""
    for _ in range(int(count[1])):
        line = await reader.readuntil(b"\r\n")
        size = _SIZE.fullmatch(line)
        if size is None:
            return b""
        request += line + await reader.readexactly(int(size[1]) + 2)
    return request if LOGIN.match(request) else b""


async def _relay(
    login: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    server: Path,
    turns: asyncio.Semaphore,
) -> None:
    """Relays a connection that begins with ``login``, unless the server refuses the password."""
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(FIRST_S), turns:
            answers, requests = await asyncio.open_unix_connection(server, limit=CHUNK)
            stack.enter_context(contextlib.closing(requests))
            requests.write(login)
            answer = await answers.read(CHUNK)
        writer.write(answer)
        await writer.drain()
        if answer[:1] in (b"", b"-"):
            return
        ways = {
            asyncio.create_task(_copy(reader, requests)),
            asyncio.create_task(_copy(answers, writer)),
        }
        _, left = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in left:
            way.cancel()
        await asyncio.wait(ways)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(*_ENDED):
        while data := await source.read(CHUNK):
            target.write(data)
            await target.drain()


if __name__ == "__main__":
    set_process_limits()
    asyncio.run(_serve(socket.socket(fileno=0), Path(sys.argv[1]), Path(sys.argv[2])))
