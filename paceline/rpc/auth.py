"""Bearer token and TLS files of a run."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.config.schema import AuthConfig
from paceline.errors import BadInput

TOKEN_VARIABLE = "PACELINE_TOKEN"


class AuthError(BadInput):
    """The token or a TLS file cannot be used. The message names it and the remedy."""


def read_token(auth: AuthConfig) -> str | None:
    """The token that clients present: from the environment, else from the file, else none."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if token:
        return _checked(token, TOKEN_VARIABLE)
    if auth.token_file is None:
        return None
    path = Path(auth.token_file)
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise AuthError(
            f"auth.token_file {path} cannot be read ({error.strerror}): create it, or set "
            f"{TOKEN_VARIABLE}"
        ) from error
    return _checked(token, f"auth.token_file {path}")


def _checked(token: str, where: str) -> str:
    if len(token) < 16 or not token.isascii() or any(c.isspace() for c in token):
        raise AuthError(
            f"{where} must be one line of at least 16 ASCII characters without spaces: "
            "`openssl rand -hex 24` makes one"
        )
    return token


def client_root(auth: AuthConfig) -> Path | None:
    """PEM file with which clients verify controllers; None if TLS is off."""
    if auth.tls_cert is None and auth.tls_ca is None:
        return None
    return Path(auth.tls_ca or auth.tls_cert or "")
