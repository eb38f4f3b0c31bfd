"""Bearer token and TLS files of a run.

The token is, in this order: PACELINE_TOKEN, the content of ``auth.token_file``, or the run's own
token in ``<run_dir>/token``. Only its owner can read the last one, so on one machine nobody has to
type a token, and other users of the machine have none.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from paceline.config.schema import Config
from paceline.config.sections.services import AuthConfig
from paceline.errors import BadInput
from paceline.process.files import check_ours, new_private_directory, read_ours
from paceline.rpc.addresses import is_loopback

TOKEN_VARIABLE = "PACELINE_TOKEN"
TOKEN_FILE = "token"


class AuthError(BadInput):
    """The token or a TLS file cannot be used. The message names it and the remedy."""


def read_token(auth: AuthConfig, run_dir: Path | None = None) -> str | None:
    """The token that clients present; None if none is configured and ``run_dir`` has none."""
    if token := os.environ.get(TOKEN_VARIABLE, "").strip():
        return checked_token(token, TOKEN_VARIABLE)
    if auth.token_file is not None:
        return _read(Path(auth.token_file), "auth.token_file ")
    if run_dir is None or not (run_dir / TOKEN_FILE).exists():
        return None
    check_ours(run_dir)
    return _read(run_dir / TOKEN_FILE, "")


def worker_token(config: Config, run_dir: Path | None) -> str | None:
    """The token of a worker whose run is in ``run_dir``; None: in the default directory. On the
    controllers' machine a worker may start before them: it then writes the token that they ask for.
    """
    token = read_token(config.auth, run_dir or Path("runs") / config.run.name)
    if token is None and run_dir is not None and is_loopback(config.controller.host):
        return own_token(new_private_directory(run_dir))
    return token


def own_token(run_dir: Path) -> str:
    """The run's own token; the first process that needs it writes the file, with mode 0600."""
    path = run_dir / TOKEN_FILE
    check_ours(run_dir)
    if path.exists():
        return _read(path, "")
    partial = path.with_name(f".token.{os.getpid()}")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(24) + "\n")
        # Atomic, and only if there is none: the first of several processes wins.
        with suppress(FileExistsError):
            os.link(partial, path)
    finally:
        partial.unlink()
    return _read(path, "")


def _read(path: Path, field: str) -> str:
    try:
        token = read_ours(path, linked=bool(field)).decode(errors="replace").strip()
    except OSError as error:
        raise AuthError(
            f"{field}{path} cannot be read ({error.strerror}): create it, or set {TOKEN_VARIABLE}"
        ) from error
    return checked_token(token, f"{field}{path}")


def checked_token(token: str, where: str) -> str:
    """``token``, if it can be one. Raises AuthError, which names ``where`` it came from."""
    if len(token) < 16 or not token.isascii() or any(c.isspace() for c in token):
        raise AuthError(
            f"{where} must be one line of at least 16 ASCII characters without spaces: "
            "`openssl rand -hex 24` makes one"
        )
    return token


def dashboard_link(url: str, token: str | None) -> str:
    """Address that opens the dashboard with the right to steer. A browser sends what is behind the
    # to nobody; the page takes it out of the address."""
    return f"{url.rstrip('/')}/#token={quote(token, safe='')}" if token else url


def client_root(auth: AuthConfig) -> Path | None:
    """PEM file with which clients verify controllers; None if TLS is off."""
    if auth.tls_cert is None and auth.tls_ca is None:
        return None
    return Path(auth.tls_ca or auth.tls_cert or "")
