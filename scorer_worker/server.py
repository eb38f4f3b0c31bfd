"""gRPC server of a scorer: authentication, checks of requests, and the status of each failure.

BadCompletion, malformed request   INVALID_ARGUMENT      the request can never be scored
another run or scorer              FAILED_PRECONDITION   the caller asks the wrong process
NoScore                            DATA_LOSS             the model's answer is no score
Unavailable, leaving               UNAVAILABLE           the caller asks another scorer, or later
any other exception                UNKNOWN               a bug, or the model failed; logged
"""

import asyncio
import json
import logging
import time
from typing import Any

import grpc
import grpc.aio
import numpy as np

from paceline.config.schema import Config
from paceline.errors import one_line
from paceline.rpc.addresses import is_loopback
from paceline.rpc.grpc_channel import METHODS, TokenServices
from paceline.rpc.listeners import add_port, new_server
from paceline.v1 import scorer_pb2
from scorer_worker.scorer import (
    BadCompletion,
    CompletionScorer,
    Item,
    NoScore,
    Unavailable,
)

log = logging.getLogger(__name__)

SCORE = METHODS["ScorerService.Score"]
MOST_COMPLETIONS = 4096
_STATUS: dict[type[Exception], grpc.StatusCode] = {
    BadCompletion: grpc.StatusCode.INVALID_ARGUMENT,
    NoScore: grpc.StatusCode.DATA_LOSS,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
}


class ScorerServer:
    """Answers rollout workers that present the run's token."""

    def __init__(self, config: Config, name: str, scorer: CompletionScorer, token: str) -> None:
        self._config, self._name, self._scorer = config, name, scorer
        self._token = token
        self._server: grpc.aio.Server | None = None
        self.open_requests = 0
        self.queued = 0
        self.scored = 0
        self.scored_requests = 0
        self.request_s = 0.0  # From the arrival of these requests to their scores
        self.idle = asyncio.Event()
        self.idle.set()
        self.leaving = False  # True: it refuses new requests

    async def start(self, host: str) -> str:
        """Listens on a free port. ``host``: address at which other machines reach this one. Returns
        host:port."""
        self._server = new_server(self._config)
        handler = grpc.unary_unary_rpc_method_handler(
            self._score,
            request_deserializer=SCORE.request.FromString,
            response_serializer=SCORE.reply.SerializeToString,
        )
        services = TokenServices({SCORE.path: handler}, self._token)
        self._server.add_generic_rpc_handlers((services,))
        at = "127.0.0.1:0" if is_loopback(host) else "0.0.0.0:0"
        port = add_port(self._server, at, self._config.auth, self._token)
        await self._server.start()
        return f"{host}:{port}"

    async def close(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def _score(
        self, request: scorer_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> scorer_pb2.ScoreReply:
        own = (self._config.run.name, self._name)
        if (request.run, request.scorer) != own:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"this is the scorer {own[1]} of {own[0]}"
            )
        if self.leaving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this scorer leaves")
        self.open_requests += 1
        self.idle.clear()
        began, count = time.monotonic(), len(request.completions)
        self.queued += count
        try:
            reply = reply_of(await self._scorer.score(items_of(request)))
            self.scored += count
            self.scored_requests += 1
            self.request_s += time.monotonic() - began
            return reply
        except Exception as error:
            status = _STATUS.get(type(error), grpc.StatusCode.UNKNOWN)
            if status is grpc.StatusCode.UNKNOWN:
                log.exception("a request failed")
            why = one_line(error) if status is grpc.StatusCode.UNKNOWN else str(error)
            await context.abort(status, why[:1000])
            raise  # abort has raised already
        finally:
            self.queued -= count
            self.open_requests -= 1
            if not self.open_requests:
                self.idle.set()


def items_of(request: scorer_pb2.ScoreRequest) -> list[Item]:
    """Raises BadCompletion if the request is malformed."""
    if not 1 <= len(request.completions) <= MOST_COMPLETIONS:
        raise BadCompletion(f"a request has 1 to {MOST_COMPLETIONS} completions")
    prompt = _tokens(request.prompt_tokens, "prompt_tokens")
    try:
        answer = json.loads(request.answer_json) if request.answer_json else ""
    except (ValueError, RecursionError) as error:
        raise BadCompletion(f"answer_json is no JSON: {error}") from None
    shown = answer if isinstance(answer, str) else json.dumps(answer)
    return [
        Item(prompt, _tokens(one.tokens, "tokens"), request.prompt, one.text, shown)
        for one in request.completions
    ]


def reply_of(scores: list[Any]) -> scorer_pb2.ScoreReply:
    """Raises NoScore for an empty list."""
    if not scores:
        raise NoScore("the scorer returned nothing")
    if isinstance(scores[0], np.ndarray):
        columns = [np.ascontiguousarray(s, dtype="<f4").tobytes() for s in scores]
        return scorer_pb2.ScoreReply(columns=columns)
    return scorer_pb2.ScoreReply(scores=scores)


def _tokens(buffer: bytes, field: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    if not buffer or len(buffer) % 4:
        raise BadCompletion(f"{field} has {len(buffer)} bytes: at least one token, 4 bytes each")
    tokens = np.frombuffer(buffer, dtype="<i4").astype(np.int32)
    if tokens.min() < 0:
        raise BadCompletion(f"{field} has the token {tokens.min()}")
    return tokens
