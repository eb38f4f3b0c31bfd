"""gRPC channels, the table of methods, and messages as plain values, for clients and servers."""

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory

from paceline.rpc.listeners import client_credentials
from paceline.v1 import admin_pb2, policy_pb2, rollout_pb2, scorer_pb2, worker_pb2

LEADER_KEY = "paceline-leader"
"""Trailing metadata in which a standby names the leader."""

TOKEN_KEY = "authorization"
AS_TEXT = frozenset({"incarnation"})


@dataclass(frozen=True, slots=True)
class Method:
    """One remote procedure."""

    name: str
    path: str
    request: type[Any]
    reply: type[Any]
    streams: bool
    """Both ways."""


METHODS = {
    f"{service.name}.{method.name}": Method(
        name=method.name,
        path=f"/{service.full_name}/{method.name}",
        request=message_factory.GetMessageClass(method.input_type),
        reply=message_factory.GetMessageClass(method.output_type),
        streams=method.client_streaming and method.server_streaming,
    )
    for module in (admin_pb2, policy_pb2, rollout_pb2, scorer_pb2, worker_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class TokenServices(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds the handler of a method by its path, and checks the caller's token before it reads a
    message."""

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler], token: str) -> None:
        self._handlers, self._offered = handlers, f"Bearer {token}".encode()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        offered = dict(details.invocation_metadata).get(TOKEN_KEY, b"")
        if isinstance(offered, str):
            offered = offered.encode()
        if not hmac.compare_digest(offered, self._offered):
            return _DENIED
        return self._handlers.get(details.method)


async def _deny(requests: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "a valid bearer token is required: give the run's directory (--run-dir), whose file "
        "`token` holds it, or set PACELINE_TOKEN or auth.token_file",
    )


# Works for every kind of method, because it ends the call before a message is read or sent.
_DENIED = grpc.stream_stream_rpc_method_handler(_deny)


def open_channel(
    address: str, token: str | None, *, tls_ca: Path | None, max_message_mb: int = 64
) -> Any:
    """Opens a grpc.aio.Channel to one listener, which proves itself before it is sent anything:
    with the root in ``tls_ca``, or by ``token``. It reconnects quickly: a failover takes about a
    second."""
    credentials, named = client_credentials(address, token, tls_ca)
    options = [
        *named,
        ("grpc.max_receive_message_length", max_message_mb << 20),
        ("grpc.max_send_message_length", max_message_mb << 20),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        # An Internet proxy must not see the control plane.
        ("grpc.enable_http_proxy", 0),
    ]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def bind_method(channel: grpc.aio.Channel, method: Method) -> Callable[..., Any]:
    bound: Callable[..., Any] = (channel.stream_stream if method.streams else channel.unary_unary)(
        method.path,
        request_serializer=method.request.SerializeToString,
        response_deserializer=method.reply.FromString,
    )
    return bound


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of every call."""
    return ((TOKEN_KEY, f"Bearer {token}"),) if token else ()


def as_dict(message: Any) -> dict[str, Any]:
    """``message`` as a dictionary that JSON can hold; enums by their short lower-case name, absent
    fields by their defaults. Incarnations become text: they are random in 64 bits, and many readers
    of JSON have 53 for a number."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            result[field.name] = {key: value[key] for key in sorted(value)}
        elif field.is_repeated:
            result[field.name] = [_plain(field, item) for item in value]
        else:
            result[field.name] = _plain(field, value)
    return result


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return as_dict(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name.rpartition("_")[2].lower()
    return str(value) if field.name in AS_TEXT else value
