"""/v1/chat/completions and /v1/models for the samples that environments are making.

    request ──► which sample? ──► what is new? ──► conversation.say ──► reply
                                                        ▲ the client is gone: the turn is taken back

Imported only where rollout.openai is set: the web framework is not light.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rollout_worker.engine.base import Aborted, EngineError, SamplingParams
from rollout_worker.engine.transformers.rng import sample_keys
from rollout_worker.environments.base import (
    BadTurn,
    EnvironmentFailed,
    TranscriptFull,
    TranscriptOver,
    Turn,
)
from rollout_worker.environments.conversation import FULL, Conversation
from rollout_worker.openai_server import history, replies
from rollout_worker.openai_server.api_errors import ApiError, unsupported
from rollout_worker.openai_server.requests import ChatRequest, parse
from rollout_worker.tokenizer import BadPrompt, PromptTokenizer

HEADER = "X-Paceline-Sample"
MAX_BODY = 16 << 20
"""Bytes."""
_STILL_HERE_S = 10.0
"""A stream that waits for the model says so this often: clients and proxies drop silent ones."""


class ChatApp:
    """``find(key)``: the conversation of the sample that a key names. ``as_asked``: temperature and
    top_p are those of the request, not of the run."""

    def __init__(
        self,
        find: Callable[[str], Conversation | None],
        *,
        model: str,
        tokenizer: PromptTokenizer,
        as_asked: bool,
    ) -> None:
        self._find = find
        self._model = model
        self._tokenizer = tokenizer
        self._as_asked = as_asked
        self._since = int(time.time())

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{name:path}", self.named_model, methods=["GET"]),
            ],
            exception_handlers={ApiError: _refused, 404: _no_route, 405: _no_route},
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def named_model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    async def complete(self, request: Request) -> Response:
        conversation = self._conversation(request)
        asked = parse(await _json(request))
        self._check_model(asked.model)
        self._check_tools(conversation, asked)
        calls = f"call_{conversation.request_id}" if asked.calls else ""
        reply = replies.Reply(self._model, self._tokenizer, asked.logprobs, calls)
        turn = self._newest_again(request, conversation, asked)
        if turn is not None:
            work = _ready(turn)
        else:
            said = history.added(conversation.messages, asked.messages)
            work = asyncio.ensure_future(
                conversation.say(
                    said,
                    max_tokens=asked.max_tokens,
                    stop=asked.stop,
                    change=partial(self._sampling, asked),
                    # Another request's turn may be recorded before this one's begins.
                    after=len(conversation.pieces),
                    tools=asked.tools,
                )
            )
        # What can be refused is refused now, before a stream has begun.
        await asyncio.sleep(0)
        if work.done():
            _result(work)
        return _Answer(work, reply, asked)

    def _conversation(self, request: Request) -> Conversation:
        key = request.headers.get(HEADER)
        if key is None:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer":
                key = ""
        if not key.strip():
            raise ApiError(
                400, f"which sample? Name it in the header {HEADER} or as the key", "missing_sample"
            )
        conversation = self._find(key.strip())
        if conversation is None:
            raise ApiError(404, "no such sample here, or not any more", "unknown_sample")
        return conversation

    def _check_model(self, name: str) -> None:
        if name not in (self._model, self._model.rstrip("/").rpartition("/")[2]):
            raise ApiError(
                404,
                f"no model {name[:200]!r} here, only {self._model!r}",
                "model_not_found",
                "model",
            )

    def _check_tools(self, conversation: Conversation, asked: ChatRequest) -> None:
        if conversation.pieces:
            # They are part of the first prompt, which stands.
            if asked.tools != conversation.tools:
                raise ApiError(
                    400,
                    "tools: not those of this sample's first request; tool_choice = none is how a "
                    "turn goes without",
                    history.DIVERGED,
                    "tools",
                )
            return
        try:
            takes = not asked.tools or self._tokenizer.takes_tools(asked.tools)
        except BadPrompt as error:
            raise unsupported("tools", f"tools: {error}") from error
        if not takes:
            raise unsupported(
                "tools", "the model's chat template does not say how tools are told to it"
            )

    def _newest_again(
        self, request: Request, conversation: Conversation, asked: ChatRequest
    ) -> Turn | None:
        """The newest turn, where this is the request for it once more: its reply got lost."""
        if not request.headers.get("x-stainless-retry-count", "0").lstrip("0"):
            return None
        if not history.repeats(conversation.messages, asked.messages):
            return None
        return conversation.pieces[-1].turn

    def _sampling(self, asked: ChatRequest, params: SamplingParams) -> SamplingParams:
        if not self._as_asked:
            if asked.seed is None:
                return params
            # Mixed in: the samples of a group must not become equal because all ask for one seed.
            key = sample_keys(params.seed, np.array([asked.seed]))
            return replace(params, seed=int(key[0]))
        return replace(
            params,
            greedy=params.greedy if asked.temperature is None else asked.temperature == 0,
            temperature=asked.temperature or params.temperature,
            top_p=params.top_p if asked.top_p is None else asked.top_p,
            seed=params.seed if asked.seed is None else asked.seed & (1 << 64) - 1,
        )

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._since,
            "owned_by": "paceline",
        }


class _Answer(Response):
    """Waits for the turn and tells it; takes it back where the client goes before it is there."""

    def __init__(
        self, work: asyncio.Future[Turn], reply: replies.Reply, asked: ChatRequest
    ) -> None:
        super().__init__(media_type="text/event-stream" if asked.stream else "application/json")
        self._work = work
        self._reply = reply
        self._asked = asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone: asyncio.Future[Any] = asyncio.ensure_future(_gone(receive))
        try:
            if self._asked.stream:
                await self._stream(gone, send)
                return
            await asyncio.wait({self._work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self._work.done():
                await self._whole()(scope, receive, send)
        finally:
            gone.cancel()
            self._work.cancel()

    def _whole(self) -> Response:
        try:
            return JSONResponse(self._reply.whole(_result(self._work)))
        except ApiError as refusal:
            return JSONResponse(refusal.body(), refusal.status)

    async def _stream(self, gone: asyncio.Future[Any], send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _part(send, self._reply.first_chunk())
        while not self._work.done():
            await asyncio.wait(
                {self._work, gone},
                timeout=_STILL_HERE_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if gone.done():
                return
            if not self._work.done():
                await _part(send, b": the model is at it\n\n")
        try:
            for chunk in self._reply.chunks(_result(self._work), usage=self._asked.stream_usage):
                await _part(send, chunk)
        except ApiError as refusal:
            await _part(send, replies.error_event(refusal.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _result(work: asyncio.Future[Turn]) -> Turn:
    """The turn, or why there is none, as the client is told it."""
    try:
        return work.result()
    except ApiError:
        raise
    except TranscriptFull as full:
        raise ApiError(400, str(full), full.code, "messages") from full
    except BadTurn as bad:
        raise ApiError(409 if bad.busy else 400, str(bad), "bad_turn", "messages") from bad
    except EnvironmentFailed as failed:
        code = FULL if failed.reason == "prompt_too_long" else failed.reason
        raise ApiError(400, str(failed), code, "messages") from failed
    except (TranscriptOver, Aborted, EngineError, asyncio.CancelledError) as over:
        raise ApiError(410, "this sample is over", "unknown_sample") from over


def _ready(turn: Turn) -> asyncio.Future[Turn]:
    work: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
    work.set_result(turn)
    return work


async def _json(request: Request) -> Any:
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", "too_large")
    except ClientDisconnect:
        raise ApiError(400, "the body did not arrive", "invalid_json") from None
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON", "invalid_json") from None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _no_route(request: Request, error: Exception) -> Response:
    refusal = ApiError(
        404, "only POST /v1/chat/completions and GET /v1/models are served", "unknown_route"
    )
    return JSONResponse(refusal.body(), refusal.status)
