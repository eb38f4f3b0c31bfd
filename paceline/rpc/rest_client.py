"""REST client that reads from any controller, with the standard library alone."""

import hmac
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from paceline.errors import Unreachable, UserError
from paceline.rpc.request_proof import ANSWER_HEADER, answer_proof, nonce_of, proof

TIMEOUT_S = 10.0


class RestUnavailable(Unreachable):
    """None of the addresses answered."""


class RestRefused(UserError):
    """A controller refused the request. The message is its own; ``status`` is the HTTP status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class RestReader:
    """Reads from whichever of ``urls`` answers: standbys serve reads too."""

    def __init__(
        self, urls: Sequence[str], *, token: str | None = None, tls_ca: Path | None = None
    ) -> None:
        self._urls = list(urls)
        self._token = token
        context = ssl.create_default_context(cafile=str(tls_ca)) if tls_ca else None
        # An Internet proxy must not see the control plane.
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def get(self, path: str, timeout_s: float = TIMEOUT_S, **query: Any) -> Any:
        """The JSON at ``/api/v1/<path>``. Query values of None are omitted. Blocks. Raises
        RestRefused, or RestUnavailable if no address answers."""
        given = {name: value for name, value in query.items() if value is not None}
        tail = f"/api/v1/{urllib.parse.quote(path)}"
        if given:
            tail += f"?{urllib.parse.urlencode(given)}"
        trouble = "no address is known"
        for url in list(self._urls):
            signed = proof(self._token, "GET", tail) if self._token else ""
            request = urllib.request.Request(
                url + tail, headers={"Authorization": signed} if signed else {}
            )
            try:
                with self._opener.open(request, timeout=timeout_s) as answer:
                    return json.loads(self._body(answer, signed))
            except urllib.error.HTTPError as error:
                try:
                    detail = _detail(error, self._body(error, signed))
                except _Unproven as unproven:
                    trouble = f"{url}: {unproven}"
                else:
                    if error.code < 500:
                        raise RestRefused(error.code, detail) from None
                    trouble = f"{url}: {detail}"
            except (OSError, ValueError, HTTPException) as error:
                trouble = f"{url}: {getattr(error, 'reason', None) or error}"
            # The next request begins with another address.
            self._urls.append(self._urls.pop(0))
        raise RestUnavailable(f"no REST interface answers ({trouble})")

    def _body(self, answer: Any, signed: str) -> bytes:
        """Raises _Unproven for an answer, to a request with a proof, of somebody who has no token.
        A controller with another token refuses the proof, and can prove nothing either."""
        body: bytes = answer.read()
        if signed and self._token and answer.status != 401:
            expected = answer_proof(self._token, nonce_of(signed), answer.status, body)
            if not hmac.compare_digest(expected, answer.headers.get(ANSWER_HEADER) or ""):
                raise _Unproven("its answer is not proven: a stranger may have taken the port")
        return body


class _Unproven(ValueError):
    """An answer that may be a stranger's."""


def _detail(error: urllib.error.HTTPError, body: bytes) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP {error.code} {error.reason}"
