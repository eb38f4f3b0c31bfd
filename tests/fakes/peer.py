"""One gRPC peer whose answers a test scripts: the other side of a worker, a client or a command."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from paceline.rpc.grpc_channel import METHODS
from tests.fixtures.sockets import fresh_address


class Peer:
    """Answers the RPCs that it has methods for; all others are unimplemented.

    A method is a coroutine function, or an async generator function if the RPC streams its replies.
    Subclasses name it after the RPC, as in ``Register``.
    """

    def handlers(self) -> Mapping[str, Any]:
        """By the name of the RPC with its service."""
        return {name: h for name, m in METHODS.items() if (h := getattr(self, m.name, None))}

    async def start(self) -> str:
        """Its address."""
        self.server = grpc.aio.server()
        services: dict[str, dict[str, Any]] = {}
        for name, handler in self.handlers().items():
            method = METHODS[name]
            kind = "stream_stream" if method.streams else "unary_unary"
            make = getattr(grpc, f"{kind}_rpc_method_handler")
            services.setdefault(method.path.split("/")[1], {})[method.name] = make(
                handler,
                request_deserializer=method.request.FromString,
                response_serializer=method.reply.SerializeToString,
            )
        generic = [grpc.method_handlers_generic_handler(*of_one) for of_one in services.items()]
        self.server.add_generic_rpc_handlers(tuple(generic))
        address = fresh_address()
        self.server.add_insecure_port(address)
        await self.server.start()
        return address

    async def close(self) -> None:
        await self.server.stop(None)


class Answers(Peer):
    """Answers as ``handlers`` say, by the name of the RPC with its service."""

    def __init__(self, handlers: Mapping[str, Any]) -> None:
        self._handlers = handlers

    def handlers(self) -> Mapping[str, Any]:
        return self._handlers


@asynccontextmanager
async def answering(handlers: Mapping[str, Any]) -> AsyncIterator[str]:
    """Address of a peer that answers as ``handlers`` say, while the block runs."""
    peer = Answers(handlers)
    address = await peer.start()
    try:
        yield address
    finally:
        await peer.close()
