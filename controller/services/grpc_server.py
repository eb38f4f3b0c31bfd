"""gRPC server: authentication, dispatch to handlers, and the status of each failure.

A handler is ``async (controller, request) -> reply`` for unary methods and ``(controller,
requests) -> async iterator of replies`` for streams. Exceptions of a handler become:

    Invalid                       INVALID_ARGUMENT     nothing changed
    CommandRefused                by its code          nothing changed
    NotLeading, Deposed           UNAVAILABLE          the client goes to the leader in the metadata
    RedisError, OSError           UNAVAILABLE          a store does not answer; the client repeats
    any other exception           UNKNOWN              a bug of the controller; its stack is logged
"""

import logging
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from redis.exceptions import RedisError

from controller.ledger.decisions.commands import CommandRefused
from controller.replicated_controller import Controller
from controller.runtime import NotLeading
from controller.store.journal import Deposed
from paceline.payloads.group_limits import Invalid
from paceline.process.structured_log import event, first_line
from paceline.rpc.grpc_channel import LEADER_KEY, METHODS, Method, TokenServices

log = logging.getLogger(__name__)

Unary = Callable[["Controller", Any], Awaitable[Any]]
Streaming = Callable[["Controller", Any], AsyncIterator[Any]]


class Services(TokenServices):
    def __init__(
        self, controller: Controller, handlers: Mapping[str, Unary | Streaming], token: str
    ) -> None:
        wrapped = {
            METHODS[name].path: _wrap(controller, METHODS[name], handler)
            for name, handler in handlers.items()
        }
        super().__init__(wrapped, token)


def _wrap(controller: Controller, method: Method, handler: Any) -> grpc.RpcMethodHandler:
    codec = {"request_deserializer": method.request.FromString, "response_serializer": _serialize}
    if not method.streams:

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                return await handler(controller, request)
            except Exception as error:
                # The abort below is an exception too, whose traceback may live until a collection
                # of garbage: without this line it would keep requests of up to 64 MB.
                del request
                await _abort(context, controller, method, error)

        return grpc.unary_unary_rpc_method_handler(unary, **codec)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for reply in handler(controller, request):
                yield reply
        except Exception as error:
            await _abort(context, controller, method, error)

    return grpc.stream_stream_rpc_method_handler(stream, **codec)


def _serialize(reply: Any) -> bytes:
    """Bytes of a reply. ``reply`` may already be serialised."""
    return reply if isinstance(reply, bytes) else bytes(reply.SerializeToString())


def final_error(controller: Controller, error: Exception) -> Exception:
    """``error``, unless it is a refusal by a leader whose lease has run out. Such a leader may
    refuse a request that its successor would accept, and a refusal is final."""
    if isinstance(error, CommandRefused | Invalid):
        leader = controller.leader
        if leader is not None and not leader.active:
            return NotLeading("the leader's lease has run out", controller.hint)
    return error


async def _abort(
    context: grpc.aio.ServicerContext, controller: Controller, method: Method, error: Exception
) -> None:
    """Answers a request whose handler has raised ``error``, which keeps nothing of the request
    afterwards."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    error = final_error(controller, error)
    code, message, leader = grpc.StatusCode.UNAVAILABLE, str(error), ""
    match error:
        case CommandRefused():
            code = grpc.StatusCode[error.code.grpc_status]
        case Invalid():
            code = grpc.StatusCode.INVALID_ARGUMENT
        case NotLeading() | Deposed():
            leader = getattr(error, "leader", "")
        case RedisError() | OSError():
            why = f"{type(error).__name__}: {first_line(error)}"
            event(log, "store failed", method=method.name, why=why, level=logging.WARNING)
            message = f"{method.name}: a store does not answer: {why}"
        case _:
            log.exception("failed method=%s", method.name, exc_info=error)
            code = grpc.StatusCode.UNKNOWN
            message = f"{method.name} failed: {type(error).__name__}"
    # Its frames hold the request as well.
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None
    await context.abort(code, message, ((LEADER_KEY, leader),) if leader else ())
