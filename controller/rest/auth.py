"""Access control: reads on loopback are open; everything else needs the bearer token.

- The token is compared in constant time and read only from the Authorization header. It is never
  read from the URL, a form or a cookie, so another site's page cannot make a browser send it. Our
  page and our commands do not send it at all: they prove that they have it (``request_proof``).
- A request from another site's page, as reported by the browser, is refused even with the token.
  Pages of the run's other controllers are accepted, so that an open dashboard continues with
  another controller when its own dies.
- Whoever guesses tokens waits for turns with all who have none: see readers.py.
"""

import asyncio
import hashlib
import hmac
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.rest.readers import REFUSED_AFTER_S, Lane
from controller.rest.schemas import respond
from paceline.rpc.addresses import is_loopback
from paceline.rpc.request_proof import Proofs

MOST_BODY = 64 << 10
PROVEN = "paceline-proven"
"""In the scope's state: SHA-256 of the body that the request's proof is for; empty for a request
with the token itself, None for one with neither."""
READS = frozenset({"GET", "HEAD"})
PROBES = frozenset({"/healthz", "/readyz"})
OPEN_PATHS = PROBES | {"/"}
"""Paths that reveal nothing of the run: probes, and the dashboard without its data."""
STATIC = "/static/"
ENDLESS = "/api/v1/events/stream"

PreflightHeaders = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "authorization, content-type, last-event-id",
    "Access-Control-Max-Age": "60",
}

Place = tuple[str, str, int]  # Scheme, host and port of an origin; every loopback name is one host


@dataclass(slots=True)
class RestAuth:
    """Middleware around the REST application ``app``. ``origins`` returns the URLs of the run's
    other controllers, ``policy`` the content security policy of the dashboard. Both are called anew
    for each request that needs them."""

    app: ASGIApp
    token: str = field(repr=False)
    loopback: bool
    origins: Callable[[], Collection[str]]
    policy: Callable[[], str]
    _lanes: dict[str, Lane] = field(default_factory=lambda: defaultdict(Lane))
    """Turns of probes, of requests with the token, and of all others."""
    _proofs: Proofs = field(init=False)
    _bearer: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._proofs, self._bearer = Proofs(self.token), f"Bearer {self.token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        headers = self._headers(request)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        refusal = self._answer(request)
        wait_s = self._lane_of(request).wait_s()
        if wait_s is None:
            wait_s, refusal = REFUSED_AFTER_S, busy(scope)
        if wait_s:
            await asyncio.sleep(wait_s)
        if refusal is None and request.method not in READS and scope["state"].get(PROVEN):
            receive, refusal = await _proven_body(scope, receive)
        if request.method == "HEAD" and request.scope["path"] != ENDLESS:
            # The server omits the body. Probes and load balancers send HEAD.
            scope = {**scope, "method": "GET"}
        await (refusal or self.app)(scope, receive, send_with_headers)

    def _headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        found = {
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Opener-Policy": "same-origin",
            "X-Frame-Options": "DENY",
        }
        path = request.scope["path"]
        if path == "/" or path.startswith(STATIC):
            found["Content-Security-Policy"] = self.policy()
            found["Cache-Control"] = "no-cache"
        else:
            found["Content-Security-Policy"] = "default-src 'none'; frame-ancestors 'none'"
            found["Cache-Control"] = "no-store"
        if self._from_our_page(request):
            found["Access-Control-Allow-Origin"] = request.headers["origin"]
            found["Vary"] = "Origin"
        return [(name.lower().encode(), value.encode()) for name, value in found.items()]

    def _answer(self, request: Request) -> Response | None:
        """A response in place of the application's: a refusal, or that to a preflight request."""
        path, method = request.scope["path"], request.method
        if not self._host_is_ours(request):
            return respond(403, "the Host header is not an address of this controller", path)
        if method == "OPTIONS":
            if self._from_our_page(request):
                return Response(status_code=204, headers=PreflightHeaders)
            return respond(403, "requests from another site's page are refused", path)
        write = method not in READS
        if write and self._cross_site(request):
            return respond(403, "writes from another site's page are refused", path)
        return self._unauthorised(request, path, write) or (
            _too_large(request, path) if write else None
        )

    def _unauthorised(self, request: Request, path: str, write: bool) -> Response | None:
        offered = request.headers.get("authorization", "").encode("utf-8", "replace")
        is_open = self.loopback or path in OPEN_PATHS or path.startswith(STATIC)
        if not offered and not write and is_open:
            return None
        if self._authorised(request):
            return None
        problem = "the token is wrong" if offered else "this request needs the run's token"
        problem += ": send Authorization: Bearer TOKEN"
        return respond(401, problem, path, {"WWW-Authenticate": "Bearer"})

    def _lane_of(self, request: Request) -> Lane:
        if request.scope["path"] in PROBES:
            return self._lanes["probes"]
        return self._lanes["owner" if self._authorised(request) else "others"]

    def _authorised(self, request: Request) -> bool:
        """True if the request has the token, or the proof of it; a proof is looked at once."""
        scope = request.scope
        state = scope.setdefault("state", {})
        if PROVEN not in state:
            offered = request.headers.get("authorization", "")
            if hmac.compare_digest(offered.encode("utf-8", "replace"), self._bearer):
                state[PROVEN] = ""
            else:
                path = scope.get("raw_path") or quote(scope["path"]).encode()
                query = scope.get("query_string", b"")
                sent = (path + b"?" + query if query else path).decode("latin-1")
                state[PROVEN] = self._proofs.accept(offered, request.method, sent)
        return state[PROVEN] is not None

    def _host_is_ours(self, request: Request) -> bool:
        """Checked on loopback only: a foreign name that resolves to 127.0.0.1 is a rebinding
        attack."""
        if not self.loopback:
            return True
        try:
            host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        except ValueError:
            return False
        return is_loopback(host)

    def _cross_site(self, request: Request) -> bool:
        if "origin" in request.headers:
            return not self._from_our_page(request)
        # Tools that are no browsers send neither header.
        return request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")

    def _from_our_page(self, request: Request) -> bool:
        """Return True if the request names its origin, and that is a controller of this run."""
        place = place_of(request.headers.get("origin", ""))
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        return place is not None and place in map(place_of, (own, *self.origins()))


def busy(scope: Scope) -> Response:
    """Answer to a reader for whom there is no time now."""
    problem = "many others read at the moment: repeat the request"
    return respond(503, problem, scope["path"], {"Retry-After": "2"})


async def _proven_body(scope: Scope, receive: Receive) -> tuple[Receive, Response | None]:
    """The body once more, and a refusal if it is not the one that the request's proof is for."""
    body = await Request(scope, receive).body()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    if hashlib.sha256(body).hexdigest() == scope["state"][PROVEN]:
        return again, None
    return again, respond(401, "the proof is for another body", scope["path"])


def _too_large(request: Request, path: str) -> Response | None:
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers:
        return respond(411, "send the body with its Content-Length", path)
    if not (length.isascii() and length.isdigit()) or int(length) > MOST_BODY:
        return respond(413, f"a body has at most {MOST_BODY} bytes", path)
    return None


def place_of(url: str) -> Place | None:
    """Scheme, host and port of ``url``; None if it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return parts.scheme, "loopback" if is_loopback(parts.hostname) else parts.hostname, port
