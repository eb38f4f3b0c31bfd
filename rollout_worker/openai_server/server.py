"""/v1/chat/completions and /v1/models for the samples that environments are making.

    request ──► its sample's conversation ──► transcript, or a branch ──► conversation.say ──► reply
                                     client disconnected: the turn is taken back ▲

Import it only if rollout.openai is set: the web framework is slow to import.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from paceline.config.schema import Config
from paceline.process.structured_log import event
from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer
from paceline.rpc.http_server import http_server
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
from rollout_worker.openai_server.replies import UNSUPPORTED, ApiError, ChatReply, sse
from rollout_worker.openai_server.requests import ChatRequest, answered, place_of

logger = logging.getLogger(__name__)

HEADER = "X-Paceline-Sample"
HOST = "127.0.0.1"
MAX_BODY = 16 << 20  # Bytes
_BACKLOG = 512
_KEEP_ALIVE_S = 10.0
"""Between two comments in a waiting stream: clients and proxies drop silent ones."""
_STOP_S = 1.0


class ChatServer:
    """Serves on loopback. A sample's key is 144 random bits; other callers are refused."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer) -> None:
        """Raises BadEnvironment if the tokenizer has no chat template."""
        if not tokenizer.has_template:
            raise BadEnvironment("rollout.openai needs a tokenizer with a chat template")
        self._rollout = config.rollout
        self._model = config.model.path
        self._served: dict[str, Conversation] = {}
        about = {"object": "model", "created": int(time.time()), "owned_by": "paceline"}
        self._card = {"id": self._model, **about}
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.models, methods=["GET"]),
            ],
            exception_handlers={ApiError: _refused, 404: _no_route, 405: _no_route},
        )
        # One connection for each sample, and other settings bound the samples.
        self._server = http_server(app, most_connections=None)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises BadEnvironment if the port is taken."""
        try:
            # It reuses addresses, so that a restarted worker gets its port again.
            bound = socket.create_server((HOST, self._rollout.openai_port), backlog=_BACKLOG)
        except OSError as error:
            raise BadEnvironment(
                f"rollout.openai_port = {self._rollout.openai_port}: {error.strerror}; 0 takes a "
                "free port"
            ) from error
        bound.setblocking(False)
        self.url = f"http://{HOST}:{bound.getsockname()[1]}/v1"
        self._task = asyncio.create_task(self._serve(bound), name="openai")
        event(logger, "openai endpoint", url=self.url, model=self._model)

    async def close(self) -> None:
        for conversation in self._served.values():
            conversation.close()
        self._served.clear()
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_STOP_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def endpoint(self) -> Endpoint:
        """For one sample, with its own key. ``admit`` starts serving it."""
        key = secrets.token_urlsafe(18)
        headers = {HEADER: key}
        return Endpoint(base_url=self.url, api_key=key, headers=headers, model=self._model)

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

    async def models(self, request: Request) -> Response:
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [self._card]})
        self._check_model(name)
        return JSONResponse(self._card)

    async def complete(self, request: Request) -> Response:
        conversation = self._conversation(request)
        asked = await _parse(request)
        self._check_model(asked.model)
        self._check_tools(conversation, asked)
        call_ids = f"call_{conversation.request_id}" if asked.reports_calls else ""
        reply = ChatReply(self._model, conversation.tokenizer, asked.logprobs, call_ids)
        turn = asyncio.ensure_future(self._turn(request, conversation, asked))
        # A request that can be refused is refused now, before a stream has begun.
        await asyncio.sleep(0)
        if turn.done():
            _result(turn)
        if asked.stream:
            return _Stream(turn, reply, usage=asked.stream_options.include_usage)
        gone: asyncio.Future[Any] = asyncio.ensure_future(self._disconnected(request))
        try:
            await asyncio.wait({turn, gone}, return_when=asyncio.FIRST_COMPLETED)
            return JSONResponse(reply.whole(_result(turn))) if turn.done() else Response()
        finally:
            gone.cancel()
            turn.cancel()

    async def _disconnected(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    def _conversation(self, request: Request) -> Conversation:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        key = request.headers.get(HEADER, token if scheme.lower() == "bearer" else "").strip()
        if not key:
            raise ApiError(
                400, f"no sample named: put its key into the header {HEADER}", "missing_sample"
            )
        conversation = self._served.get(key)
        if conversation is None:
            raise ApiError(404, "no such sample here, or it is over", "unknown_sample")
        return conversation

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


class _Stream(StreamingResponse):
    """Takes the turn back if the client disconnects before the end of it."""

    def __init__(self, turn: asyncio.Future[Turn], reply: ChatReply, *, usage: bool) -> None:
        events, headers = _events(turn, reply, usage), {"cache-control": "no-store"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.cancel()


async def _events(
    turn: asyncio.Future[Turn], reply: ChatReply, usage: bool
) -> AsyncIterator[bytes]:
    yield reply.first_event()
    while not (await asyncio.wait({turn}, timeout=_KEEP_ALIVE_S))[0]:
        yield b": waiting for the model\n\n"
    try:
        for chunk in reply.events(_result(turn), usage=usage):
            yield chunk
    except ApiError as refusal:
        yield sse(refusal.body())


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


async def _parse(request: Request) -> ChatRequest:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", "too_large")
        return ChatRequest.model_validate_json(bytes(body))
    except ClientDisconnect:
        raise ApiError(400, "the body did not arrive", "invalid_json") from None
    except ValidationError as invalid:
        raise ApiError.from_validation(invalid) from None


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _no_route(request: Request, error: Exception) -> Response:
    message = "only POST /v1/chat/completions and GET /v1/models are served"
    return await _refused(request, ApiError(404, message, "unknown_route"))
