"""Proof that a REST request comes from somebody who has the run's token, and that its answer does,
without sending it.

    Authorization: Paceline MILLISECONDS.NONCE.BODY.MAC
    Paceline-Proof: MAC of the answer

    BODY   SHA-256 of the request's body
    MAC    HMAC-SHA-256, with the token as key, of method, path with query, and the three before it,
           one a line; of an answer: the word answer, NONCE, the status, and SHA-256 of the body

A port outlives its process. Whoever listens there next gets a proof of the one request, which each
controller accepts once, unless it was started again, and not the token; its own answer is proven by
nothing. A write that is repeated so has one effect: its key is its request_id, or the nonce. The
dashboard makes these proofs and checks those of the answers (static/api.js).
"""

import hashlib
import hmac
import time
from typing import NamedTuple

SCHEME = "Paceline "
ANSWER_HEADER = "paceline-proof"
WINDOW_S = 300.0  # between two clocks, and during which a proof is remembered
REMEMBERED = 100_000


def answer_proof(token: str, nonce: str, status: int, body: bytes) -> str:
    """Value of ANSWER_HEADER in the answer to the request whose proof has ``nonce``."""
    return _mac(token, "answer", nonce, str(status), hashlib.sha256(body).hexdigest())


class Proven(NamedTuple):
    """Contents of a proof. Both are empty of a request that has the token itself."""

    body: str = ""  # SHA-256
    nonce: str = ""


class Proofs:
    """Proofs that a listener has accepted."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._seen: dict[str, float] = {}  # nonce: until when its proof could be offered again

    def accept(self, header: str, method: str, path: str) -> Proven | None:
        """None if it is no proof, or none for this request, or an old one."""
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
        return Proven(digest, nonce)


def _mac(token: str, *signed: str) -> str:
    text = "\n".join(signed).encode("utf-8", "surrogatepass")
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest()
