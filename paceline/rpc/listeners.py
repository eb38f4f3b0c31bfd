"""Addresses where roles listen, and the proof that a listener is the run's own.

    one machine        unix:RUN_DIR/sockets/NAME.sock   the directory is closed to other users, and
                                                        none of them can put another in its place
    several machines   host:port                        TLS by the token: both prove to have it

A port outlives its process, and whoever listens there next would be sent the token by every client
that connects again. So no credential goes to a listener before it has proved itself. Over TCP it
does so with a certificate whose private key follows from the token: all who have the token make the
same pair, and nothing has to be distributed. A certificate of the user's own (auth.tls_cert) takes
its place.
"""

import contextlib
import fcntl
import functools
import hashlib
import ipaddress
import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import grpc.aio

from paceline.config.schema import Config
from paceline.config.sections.services import AuthConfig
from paceline.errors import BadInput
from paceline.process.files import (
    NotOurs,
    open_files_limit,
    others_can_replace,
    private_directory,
)

UNIX = "unix:"
LONGEST_PATH = 107  # bytes of a Unix socket's path
HANDSHAKE_MS = 10_000  # time for the handshakes of TLS and HTTP/2
IDLE_MS = 300_000  # a connection without a call is closed after this time; clients connect again
MOST_METADATA = 16 << 10  # bytes of the headers of a call
MOST_CALLS = 1024  # at a time over one connection; further ones wait at the client
LISTENER = "paceline"  # the name in every run's certificate
UNPROVEN = "does not prove that it has this run's token"

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256


class Pair(NamedTuple):
    """PEM of a private key and its certificate."""

    key: bytes
    certificate: bytes


@functools.lru_cache(maxsize=8)
def run_certificate(token: str) -> Pair:
    """The pair that follows from ``token``. Takes about 0.2 s once: strangers see the certificate,
    and must not be able to try many tokens against it."""
    salt = b"paceline listener"
    secret = hashlib.scrypt(token.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=48)
    return certificate_of(int.from_bytes(secret, "big") % (_ORDER - 1) + 1)


def certificate_of(secret: int, host: str | None = None) -> Pair:
    """A self-signed pair whose private key is ``secret``: the same bytes at every call. ``host``:
    the name or address by which clients verify it, if they are not ours."""
    # Imported on demand: half a tenth of a second that no process on one machine needs.
    from datetime import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.derive_private_key(secret, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, LISTENER)])
    verified: x509.GeneralName = x509.DNSName(host or LISTENER)
    with contextlib.suppress(ValueError):
        verified = x509.IPAddress(ipaddress.ip_address(host or ""))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2020, 1, 1))
        .not_valid_after(datetime(9999, 12, 31))
        .add_extension(x509.SubjectAlternativeName([verified]), critical=False)
        .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), critical=True)
        .sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    return Pair(private, certificate.public_bytes(pem))


def new_server(config: Config) -> grpc.aio.Server:
    """A gRPC server, of a controller or a scorer, within the limits of what strangers may hold."""
    limit = config.controller.max_message_mb << 20
    return grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", limit),
            ("grpc.max_send_message_length", limit),
            # Otherwise two processes could listen on one port, and each would get half of the
            # calls.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            # The other half of the open files is for REST, Redis and the run's files. 1,000 workers
            # need about 1,000.
            ("grpc.max_allowed_incoming_connections", max(16, open_files_limit() // 2)),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", IDLE_MS),
            ("grpc.max_metadata_size", MOST_METADATA),
            ("grpc.max_concurrent_streams", MOST_CALLS),
        ]
    )


def add_port(server: Any, address: str, auth: AuthConfig, token: str) -> int:
    """Binds the gRPC ``server`` to host:port or unix:PATH. Returns the port; for a path, some
    number above 0. Raises BadInput if a file of ``auth`` cannot be read or nothing can be bound."""
    try:
        if address.startswith(UNIX):
            bound = server.add_insecure_port(address)
        elif auth.tls_cert and auth.tls_key:
            pair = (_pem(auth.tls_key, "tls_key"), _pem(auth.tls_cert, "tls_cert"))
            bound = server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        else:
            own = run_certificate(token)
            credentials = grpc.ssl_server_credentials([own], own.certificate, True)
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        bound = 0
    if not bound:
        raise BadInput(
            f"cannot listen on {address}: the port is in use or the address is not of this host. "
            "Stop what uses it, or set controller.port to a free one (0: any)"
        )
    return int(bound)


def client_credentials(
    address: str, token: str | None, tls_ca: Path | None
) -> tuple[grpc.ChannelCredentials | None, list[tuple[str, str]]]:
    """Credentials by which a client has ``address`` prove itself, and options of the channel. None:
    the path proves it, or the client has nothing to be stolen."""
    if address.startswith(UNIX):
        home = Path(address.removeprefix(UNIX)).parent
        closed = _is_ours_alone(home) if home.exists() else not others_can_replace(home)
        if not closed:
            raise NotOurs(
                f"{address}: {home} is not closed to other users, so anyone may listen there. Name "
                "the controllers of a run of your own"
            )
        return None, []
    if tls_ca is not None:
        return grpc.ssl_channel_credentials(tls_ca.read_bytes()), []
    if token is None:
        return None, []
    own = run_certificate(token)
    credentials = grpc.ssl_channel_credentials(own.certificate, own.key, own.certificate)
    return credentials, [("grpc.ssl_target_name_override", LISTENER)]


def socket_path(run_dir: Path, name: str) -> Path:
    """Path of the Unix socket ``name`` of a run, in a directory that is closed to other users:
    ``run_dir``/sockets, or one in /tmp if that path is too long, its file system has no sockets, or
    other users can move ``run_dir`` away."""
    home = run_dir.resolve() / "sockets"
    path, pointer = home / f"{name}.sock", home.with_suffix(".path")
    fits = len(os.fsencode(path)) <= LONGEST_PATH
    here = fits and not pointer.exists() and not others_can_replace(home.parent)
    if here and _has_sockets(home):
        return path
    short = _short_directory(pointer) / f"{name}.sock"
    if len(os.fsencode(short)) > LONGEST_PATH:
        raise BadInput(f"--id {name}: the name is too long for the path of a socket")
    return short


def _has_sockets(home: Path) -> bool:
    """Makes ``home``. False if nothing can listen there (some network file systems)."""
    if home.is_dir():
        private_directory(home)
        return True
    probe = private_directory(home) / f".{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.fspath(probe))
    except OSError:
        home.rmdir()
        return False
    probe.unlink()
    return True


def _short_directory(pointer: Path) -> Path:
    """The directory that the file ``pointer`` names. A new one if that is not there any more, or is
    not ours alone: anyone can make directories in /tmp."""
    descriptor = os.open(pointer, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
        named = Path(file.read().strip() or "/nowhere")
        if _is_ours_alone(named):
            return named
        parent = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp")
        if not os.access(parent, os.W_OK) or len(os.fsencode(parent)) > 24:
            parent = Path("/tmp")
        made = Path(tempfile.mkdtemp(prefix="paceline-", dir=parent))
        file.seek(0)
        file.truncate()
        file.write(f"{made}\n")
        return made


def _is_ours_alone(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    closed = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return closed and status.st_uid == os.getuid()


def _pem(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"auth.{field} {path} cannot be read: {error.strerror}") from error
