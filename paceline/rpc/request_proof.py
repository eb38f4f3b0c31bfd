"""Proof that a REST request comes from somebody who has the run's token, without sending it.

    Authorization: Paceline MILLISECONDS.NONCE.BODY.MAC

    BODY   SHA-256 of the request's body
    MAC    HMAC-SHA-256, with the token as key, of method, path with query, and the three before it,
           one a line

A port outlives its process. Whoever listens there next gets a proof of the one request, which each
controller accepts once, unless it was started again, and not the token. A write that is repeated so
has one effect: its body has a request_id. The dashboard makes the same proof (static/api.js).
"""

import hashlib
import hmac
import secrets
import time

SCHEME = "Paceline "
WINDOW_S = 300.0  # between two clocks, and during which a proof is remembered
REMEMBERED = 100_000


def proof(token: str, method: str, path: str, body: bytes = b"") -> str:
    """Value of the Authorization header. ``path``: with its query, as it is sent."""
    stamp, nonce = str(int(time.time() * 1000)), secrets.token_hex(16)
    digest = hashlib.sha256(body).hexdigest()
    return f"{SCHEME}{stamp}.{nonce}.{digest}.{_mac(token, method, path, stamp, nonce, digest)}"


class Proofs:
    """Proofs that a listener has accepted."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._seen: dict[str, float] = {}  # nonce: until when its proof could be offered again

    def accept(self, header: str, method: str, path: str) -> str | None:
        """SHA-256 of the body that the proof is for; None if it is no proof, or none for this
        request, or an old one."""
        parts = header.removeprefix(SCHEME).split(".")
        if not header.startswith(SCHEME) or len(parts) != 4:
            return None
        stamp, nonce, digest, mac = parts
        expected = _mac(self._token, method, path, stamp, nonce, digest)
        if not hmac.compare_digest(mac.encode("utf-8", "replace"), expected.encode()):
            return None
        now = time.time()
        if abs(int(stamp) / 1000 - now) > WINDOW_S or self._seen.get(nonce, 0.0) > now:
            return None
        if len(self._seen) >= REMEMBERED:
            self._seen = {n: until for n, until in self._seen.items() if until > now}
        self._seen[nonce] = now + 2 * WINDOW_S
        return digest


def _mac(token: str, *signed: str) -> str:
    text = "\n".join(signed).encode("utf-8", "surrogatepass")
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()
