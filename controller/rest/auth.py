"""Access control: reads on loopback are open; everything else needs the bearer token.

- The token is compared in constant time and read only from the Authorization header. It is never
  read from the URL, a form or a cookie, so another site's page cannot make a browser send it. Our
  page does not send it at all: it proves that it has it (``request_proof``).
- A request from another site's page, as reported by the browser, is refused even with the token.
  Pages of the run's other controllers are accepted, so that an open dashboard continues with
  another controller when its own dies.
- Anyone on the machine may read, the leader's event loop decides for the whole fleet, and a client
  that repeats a request as fast as it can would take as much of it as it gets. So requests wait for
  their turn, which costs nothing, in lanes: whoever has the token does not stand behind strangers,
  who guess it or only read. Of each, one question at a time is computed, with a rest after it, and
  equal questions share the answer. Who would wait too long is answered with 503 and
  ``Retry-After``, after a pause: a client that ignores it is then no faster than the others.
"""

import asyncio
import hashlib
import hmac
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.rest.request_proof import ANSWER_HEADER, Proofs, Proven, answer_proof
from controller.rest.schemas import respond
from paceline.rpc.addresses import is_loopback

log = logging.getLogger(__name__)

RATE = 100.0  # Requests a second of one lane, in the long run
BURST_S = 2.0  # A lane that was quiet may have so many seconds' requests at once
LONGEST_WAIT_S = 5.0
REFUSED_AFTER_S = 1.0
REST, OWNERS_REST = 4.0, 1.0
"""After a computation the next one waits this many times as long: strangers take a fifth of the
time, the owner a half."""
LONGEST_REST_S = 0.5
OWNERS_TURN_S = 1.0
"""The owner's next question waits no longer for one that waits for a store or a disk itself."""
MOST_WAITING = 32  # Questions of strangers, and of the owner, that wait to be computed
MOST_BODY = 64 << 10
PROVEN = "paceline-proven"
"""In the scope's state: what the request's proof is for; None for a request without the token."""
READS = frozenset({"GET", "HEAD"})
PROBES = frozenset({"/healthz", "/readyz"})
OPEN_PATHS = PROBES | {"/"}
"""Paths that reveal nothing of the run: probes, and the dashboard without its data."""
STATIC = "/static/"

PreflightHeaders = {
    "Access-Control-Allow-Methods": "GET, POST",
    "Access-Control-Allow-Headers": "authorization, content-type",
    "Access-Control-Max-Age": "60",
}

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
Place = tuple[str, str, int]  # Scheme, host and port of an origin
OWN_NAMES = ("localhost", "127.0.0.1", "::1")
"""One host. Another user may listen at any other address of 127.0.0.0/8, on the same port."""


@dataclass(slots=True)
class Lane:
    """Turns of one kind of readers."""

    clock: Callable[[], float] = time.monotonic
    _next_t: float = -BURST_S

    def wait_s(self) -> float | None:
        """Seconds until the turn of a request that comes now; None: it would be too long."""
        now = self.clock()
        turn = max(self._next_t, now - BURST_S)
        if turn - now > LONGEST_WAIT_S:
            return None
        self._next_t = turn + 1.0 / RATE
        return max(0.0, turn - now)


@dataclass(slots=True)
class Answers:
    """Answers of ``app`` to readers of one kind. Each is good until the rest after it is over. The
    next computation begins after one has ended, or has had ``turn_s`` seconds (None: any time)."""

    app: ASGIApp
    rest: float
    turn_s: float | None
    known: dict[tuple[str, bytes], asyncio.Task[list[Message]]] = field(default_factory=dict)
    _computing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _rest_until: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope["path"], scope["query_string"]
        answer = self.known.get(key)
        if answer is None or (answer.done() and time.monotonic() >= self._rest_until):
            if len(self.known) >= MOST_WAITING:
                await busy(scope)(scope, receive, send)
                return
            answer = self.known[key] = asyncio.create_task(self._compute(scope, receive))
        # One reader that leaves takes the answer from no other, and nobody waits for a connection.
        for message in await asyncio.shield(answer):
            await send(dict(message))

    async def _compute(self, scope: Scope, receive: Receive) -> list[Message]:
        messages: list[Message] = []

        async def collect(message: Message) -> None:
            messages.append(message)

        async with self._computing:
            await asyncio.sleep(max(0.0, self._rest_until - time.monotonic()))
            self.known = {asked: task for asked, task in self.known.items() if not task.done()}
            began = time.monotonic()
            computing = asyncio.ensure_future(self.app(scope, receive, collect))
            await asyncio.wait({computing}, timeout=self.turn_s)
            ended = time.monotonic()
            self._rest_until = ended + min(LONGEST_REST_S, self.rest * (ended - began))
        try:
            await computing
        except Exception:
            log.exception("a read failed path=%s", scope["path"])
        return messages


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
    _answers: dict[bool, Answers] = field(init=False)  # To the owner, and to all others

    def __post_init__(self) -> None:
        self._proofs, self._bearer = Proofs(self.token), f"Bearer {self.token}".encode()
        owners = Answers(self.app, OWNERS_REST, OWNERS_TURN_S)
        self._answers = {True: owners, False: Answers(self.app, REST, None)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        headers = self._headers(request)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *headers]
            await send(message)

        refusal, path = self._answer(request), scope["path"]
        owner = self._authorised(request)
        name = "probes" if path in PROBES else "owner" if owner else "others"
        wait_s = self._lanes[name].wait_s()
        if wait_s is None:
            wait_s, refusal = REFUSED_AFTER_S, busy(scope)
        if wait_s:
            await asyncio.sleep(wait_s)
        proven: Proven | None = scope["state"][PROVEN]
        if proven is not None and proven.nonce:
            send = self._signed(proven.nonce, send)
            if refusal is None and request.method not in READS:
                receive, refusal = await _proven_body(scope, receive, proven)
        if request.method == "HEAD":
            # The server omits the body. Probes and load balancers send HEAD.
            scope = {**scope, "method": "GET"}
        computed = path == "/metrics" or path.startswith("/api/v1/")
        read = request.method in READS
        app = self._answers[owner] if computed and read else self.app
        await (refusal or app)(scope, receive, send_with_headers)
        if not read and refusal is None:
            # What was asked before a command is no answer to who asks after it.
            for answers in self._answers.values():
                answers.known.clear()

    def _signed(self, nonce: str, send: Send) -> Send:
        """``send``, with the proof of the whole answer among its headers."""
        start: Message = {}
        body = bytearray()

        async def sign(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.update(message)
                return
            body.extend(message.get("body", b""))
            if not message.get("more_body", False):
                mac = answer_proof(self.token, nonce, start["status"], bytes(body)).encode()
                headers = [*start.get("headers", ()), (ANSWER_HEADER.encode(), mac)]
                await send({**start, "headers": headers})
                await send({**message, "body": bytes(body)})

        return sign

    def _headers(self, request: Request) -> list[tuple[bytes, bytes]]:
        found, path = dict(HEADERS), request.scope["path"]
        if path == "/" or path.startswith(STATIC):
            found |= {"Content-Security-Policy": self.policy(), "Cache-Control": "no-cache"}
        if self._from_our_page(request):
            found["Access-Control-Allow-Origin"] = request.headers["origin"]
            found["Access-Control-Expose-Headers"] = ANSWER_HEADER
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
        # Tools that are no browsers send neither header.
        foreign = request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if "origin" in request.headers:
            foreign = not self._from_our_page(request)
        if write and foreign:
            return respond(403, "writes from another site's page are refused", path)
        offered = bool(request.headers.get("authorization"))
        is_open = self.loopback or path in OPEN_PATHS or path.startswith(STATIC)
        if not self._authorised(request) and (offered or write or not is_open):
            problem = "the token is wrong" if offered else "this request needs the run's token"
            problem += ": send Authorization: Bearer TOKEN"
            return respond(401, problem, path, {"WWW-Authenticate": "Bearer"})
        if not write:
            return None
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers:
            return respond(411, "send the body with its Content-Length", path)
        if not (length.isascii() and length.isdigit()) or int(length) > MOST_BODY:
            return respond(413, f"a body has at most {MOST_BODY} bytes", path)
        return None

    def _authorised(self, request: Request) -> bool:
        """True if the request has the token, or the proof of it; a proof is looked at once."""
        scope = request.scope
        state = scope.setdefault("state", {})
        if PROVEN not in state:
            offered = request.headers.get("authorization", "")
            if hmac.compare_digest(offered.encode("utf-8", "replace"), self._bearer):
                state[PROVEN] = Proven()
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

    def _from_our_page(self, request: Request) -> bool:
        """Return True if the request names its origin, and that is a controller of this run."""
        place = place_of(request.headers.get("origin", ""))
        own = f"{request.url.scheme}://{request.headers.get('host', '')}"
        return place is not None and place in map(place_of, (own, *self.origins()))


def busy(scope: Scope) -> Response:
    """Answer to a reader for whom there is no time now."""
    problem = "many others read at the moment: repeat the request"
    return respond(503, problem, scope["path"], {"Retry-After": "2"})


async def _proven_body(
    scope: Scope, receive: Receive, proven: Proven
) -> tuple[Receive, Response | None]:
    """The body once more, and a refusal if it is not the one that the request's proof is for."""
    body = await Request(scope, receive).body()
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    if hashlib.sha256(body).hexdigest() == proven.body:
        return again, None
    return again, respond(401, "the proof is for another body", scope["path"])


def place_of(url: str) -> Place | None:
    """Scheme, host and port of ``url``; None if it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return parts.scheme, "localhost" if parts.hostname in OWN_NAMES else parts.hostname, port
