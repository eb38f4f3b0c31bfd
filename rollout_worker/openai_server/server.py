"""The APIs of OpenAI and Anthropic for the samples that environments are making.

    request ──► its sample's conversation ──► transcript, or a branch ──► conversation.say ──► reply
       │ no sample's key: one answer to all            client disconnected: the turn is taken back ▲
       └ Messages, Responses: translated into a chat completion, and its reply back

Import it only if rollout.openai is set: the web framework is slow to import.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import certifi
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.config.schema import Config
from paceline.process.files import private_directory, write_private
from paceline.process.structured_log import event
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from paceline.rpc.addresses import at, bound_socket, is_every, is_loopback
from paceline.rpc.http_server import http_server
from paceline.rpc.listeners import certificate_of
from rollout_worker.engine.base import Aborted, EngineError
from rollout_worker.environments.base import (
    BadEnvironment,
    BadTurn,
    Endpoint,
    EnvironmentFailed,
    TranscriptFull,
    TranscriptOver,
    Turn,
)
from rollout_worker.environments.conversation import FULL, Conversation
from rollout_worker.openai_server import messages_api, responses_api
from rollout_worker.openai_server.messages_api import MessagesReply, MessagesRequest
from rollout_worker.openai_server.replies import UNSUPPORTED, ApiError, ChatReply
from rollout_worker.openai_server.requests import ChatRequest, Translated, answered, place_of
from rollout_worker.openai_server.responses_api import ResponsesReply, ResponsesRequest

logger = logging.getLogger(__name__)

HEADER = "X-Paceline-Sample"
MAX_BODY = 16 << 20  # Bytes
_BACKLOG = 512
_KEEP_ALIVE_S = 10.0
"""Between two comments in a waiting stream: clients and proxies drop silent ones."""
_STOP_S = 1.0
_STRANGER = messages_api.error_body(
    ApiError(401, "the key is of no sample here, or its sample is over", "unknown_sample")
)
"""Both APIs' clients understand it."""


class ChatServer:
    """A sample's key is 144 random bits. Callers without one get the same answer to everything.
    Beyond loopback it speaks TLS, by a certificate of its own that clients get as a file."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer, home: Path | None) -> None:
        """``home``: directory of those files, which is this server's alone; None: a temporary one.
        Raises BadEnvironment if the tokenizer has no chat template."""
        if not tokenizer.has_template:
            raise BadEnvironment("rollout.openai needs a tokenizer with a chat template")
        self._rollout = config.rollout
        self._model = config.model.path
        self._served: dict[str, Conversation] = {}
        self._home = home
        self._own = ""
        self._ca: str | None = None
        self._trust: str | None = None
        about = {"object": "model", "created": int(time.time()), "owned_by": "paceline"}
        self._card = {"id": self._model, **about}
        self._app = Starlette(
            routes=[
                _post("/v1/chat/completions", partial(self.answer, ChatRequest, ChatReply)),
                _post("/v1/responses", partial(self.answer, ResponsesRequest, ResponsesReply)),
                _post("/v1/messages", partial(self.answer, MessagesRequest, MessagesReply)),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.models, methods=["GET"]),
            ],
            exception_handlers={ApiError: _refused, 404: _no_route, 405: _no_route},
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self, own_host: str) -> None:
        """``own_host``: address at which others reach this machine, for a server on all addresses.
        Raises BadEnvironment if the port is taken or the address is not of this machine."""
        host, port = self._rollout.openai_host, self._rollout.openai_port
        try:
            # It reuses addresses, so that a restarted worker gets its port again.
            bound = bound_socket(host, port, backlog=_BACKLOG)
        except OSError as error:
            raise BadEnvironment(
                f"rollout.openai_host = {host!r}, rollout.openai_port = {port}: {error.strerror}; "
                "the host is an address of this machine, and port 0 takes a free one"
            ) from error
        bound.setblocking(False)
        pair, scheme = None, "http"
        if not is_loopback(host):
            host = own_host if is_every(host) else host
            pair, scheme = self._certify(host), "https"
        # One connection for each sample, and other settings bound the samples.
        self._server = http_server(self, tls_cert=pair, most_connections=None)
        self._origin = f"{scheme}://{at(host, bound.getsockname()[1])}"
        self._task = asyncio.create_task(self._serve(bound), name="openai")
        event(logger, "openai endpoint", url=self._origin, model=self._model)

    def _certify(self, host: str) -> str:
        """Path of a key and its certificate for ``host``, in memory alone: what a killed worker
        leaves is no secret, and containers may mount the directory of what clients read."""
        home = private_directory(self._home or Path(tempfile.mkdtemp(prefix="paceline-endpoint-")))
        self._home = home
        pair = certificate_of(1 + secrets.randbits(255), host)
        own = self._own = pair.certificate.decode()
        others = Path(ssl.get_default_verify_paths().cafile or certifi.where())
        for name, text in (("ca.pem", own), ("trust.pem", f"{own}\n{others.read_text()}")):
            write_private(home / name, text)
        self._ca, self._trust = str(home / "ca.pem"), str(home / "trust.pem")
        both = os.memfd_create("endpoint")
        os.write(both, pair.key + pair.certificate)
        return f"/proc/self/fd/{both}"

    async def close(self) -> None:
        for conversation in self._served.values():
            conversation.close()
        self._served.clear()
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait({self._task}, timeout=_STOP_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._ca is not None:
            self._remove(Path(self._ca))

    def _remove(self, ca: Path) -> None:
        with contextlib.suppress(OSError):
            if ca.read_text() == self._own:  # not its successor's
                shutil.rmtree(ca.parent)

    def endpoint(self) -> Endpoint:
        """For one sample, with its own key. ``admit`` starts serving it."""
        key = secrets.token_urlsafe(18)
        return Endpoint(
            base_url=f"{self._origin}/v1",
            anthropic_url=self._origin,
            ca_file=self._ca,
            trust_file=self._trust,
            api_key=key,
            headers={HEADER: key},
            model=self._model,
        )

    def admit(self, endpoint: Endpoint, conversation: Conversation) -> None:
        self._served[endpoint.api_key] = conversation

    def dismiss(self, endpoint: Endpoint) -> None:
        self._served.pop(endpoint.api_key, None)

    async def _serve(self, bound: socket.socket) -> None:
        try:
            await self._server.serve(sockets=[bound])
        except Exception:
            # Agents then get connection errors, and their groups fail.
            logger.exception("openai endpoint failed")
        finally:
            bound.close()

    # ---- requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Lets requests of samples in. For all others it reads no body and looks at no path."""
        conversation = self._served.get(_key(Headers(scope=scope)))
        if conversation is None:
            await JSONResponse(_STRANGER, 401)(scope, receive, send)
        else:
            await self._app({**scope, "conversation": conversation}, receive, send)

    async def models(self, request: Request) -> Response:
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [self._card]})
        self._check_model(name)
        return JSONResponse(self._card)

    async def answer(
        self, body: type[ChatRequest | Translated], kind: type[ChatReply], request: Request
    ) -> Response:
        conversation: Conversation = request.scope["conversation"]
        asked = await _parse(request, body)
        self._check_model(asked.model)
        self._check_tools(conversation, asked)
        call_ids = f"call_{conversation.request_id}" if asked.reports_calls else ""
        reply = kind(self._model, conversation.tokenizer, asked, call_ids)
        turn = asyncio.ensure_future(self._turn(request, conversation, asked))
        # A request that can be refused is refused now, before a stream has begun.
        await asyncio.sleep(0)
        if turn.done():
            _result(turn)
        if asked.stream:
            return _Stream(turn, reply, conversation.told)
        gone: asyncio.Future[Any] = asyncio.ensure_future(self._disconnected(request))
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                return Response()
            content = reply.whole(_result(turn))
            sent = BackgroundTask(_note, conversation.told, turn.result().number)
            return JSONResponse(content, background=None if gone.done() else sent)
        finally:
            gone.cancel()
            turn.cancel()

    async def _disconnected(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    def _check_model(self, name: str) -> None:
        if name not in (self._model, self._model.rstrip("/").rpartition("/")[2]):
            message = f"no model {name[:200]!r} here, only {self._model!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def _check_tools(self, conversation: Conversation, asked: ChatRequest) -> None:
        if any(transcript.tools == asked.tools for transcript in conversation.transcripts):
            return
        message = "the model's chat template does not render tools"
        try:
            if not asked.tools or conversation.tokenizer.takes_tools(asked.tools):
                return
        except BadPrompt as error:
            message = f"tools: {error}"
        raise ApiError(400, message, UNSUPPORTED, "tools")

    async def _turn(self, request: Request, conversation: Conversation, asked: ChatRequest) -> Turn:
        messages = asked.conversation()
        is_retry = request.headers.get("x-stainless-retry-count", "0").lstrip("0")
        if is_retry and (turn := answered(conversation, messages, asked.tools)) is not None:
            # Its reply was lost, and it is sent once more.
            conversation.told.add(turn.number)
            return turn
        # Nothing is awaited until the transcript has its next turn under way.
        threshold = self._rollout.branch_threshold
        place = place_of(conversation, messages, asked.tools, threshold)
        return await conversation.say(
            place.new,
            transcript=place.transcript,
            max_tokens=asked.limit,
            stop=asked.stop,
            seed=asked.seed,
            tools=asked.tools,
            calls=place.calls,
        )


async def _note(told: set[int], number: int) -> None:
    """Not a plain function: that would run in a thread, after the client's next request."""
    told.add(number)


class _Stream(StreamingResponse):
    """Takes the turn back if the client disconnects before the end of it."""

    def __init__(self, turn: asyncio.Future[Turn], reply: ChatReply, told: set[int]) -> None:
        events, headers = _events(turn, reply, told), {"cache-control": "no-store"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.cancel()


async def _events(
    turn: asyncio.Future[Turn], reply: ChatReply, told: set[int]
) -> AsyncIterator[bytes]:
    yield reply.first_event()
    while not (await asyncio.wait({turn}, timeout=_KEEP_ALIVE_S))[0]:
        yield b": waiting for the model\n\n"
    try:
        for chunk in reply.events(_result(turn)):
            yield chunk
        told.add(turn.result().number)
    except ApiError as refusal:
        yield reply.failure(refusal)


def _result(turn: asyncio.Future[Turn]) -> Turn:
    try:
        return turn.result()
    except TranscriptFull as full:
        raise ApiError(400, str(full), full.code, "messages") from full
    except BadTurn as bad:
        raise ApiError(400, str(bad), "bad_turn", "messages") from bad
    except EnvironmentFailed as failed:
        code = FULL if failed.reason == "prompt_too_long" else failed.reason
        raise ApiError(400, str(failed), code, "messages") from failed
    except (TranscriptOver, Aborted, EngineError, asyncio.CancelledError) as over:
        raise ApiError(410, "this sample is over", "unknown_sample") from over


async def _parse(request: Request, kind: type[ChatRequest | Translated]) -> ChatRequest:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", "too_large")
        asked = kind.model_validate_json(bytes(body))
        return asked if isinstance(asked, ChatRequest) else asked.chat()
    except ClientDisconnect:
        raise ApiError(400, "the body did not arrive", "invalid_json") from None
    except ValidationError as invalid:
        raise ApiError.from_validation(invalid) from None


def _key(headers: Headers) -> str:
    """The sample's key; empty if there is none."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    bearer = token if scheme.lower() == "bearer" else ""
    return (headers.get(HEADER) or headers.get("X-Api-Key") or bearer).strip()


def _post(path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
    return Route(path, answer, methods=["POST"])


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    bodies = {"messages": messages_api.error_body, "responses": responses_api.error_body}
    name = request.url.path.removeprefix("/v1/").partition("/")[0]
    body = bodies.get(name, ApiError.body)
    return JSONResponse(body(error), error.status)


async def _no_route(request: Request, error: Exception) -> Response:
    message = (
        "only POST /v1/chat/completions, /v1/responses, /v1/messages and GET /v1/models are served"
    )
    return await _refused(request, ApiError(404, message, "unknown_route"))
