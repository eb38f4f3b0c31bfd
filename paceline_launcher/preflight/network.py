"""Checks of a run's connections: provider, access, ports, Redis and controllers."""

import asyncio
import os
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.config.sections.services import RedisConfig
from paceline.errors import BadInput
from paceline.observe.fleet_file import FleetRecord
from paceline.redis.server import REDIS_OUT_OF_REACH, NoRedis, ensure_redis, find_server
from paceline.rpc.addresses import is_loopback
from paceline.rpc.auth import AuthError, client_root, read_token
from paceline.rpc.ports import free_ports, taken_ports
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, skip, warn

LAST_PORT = 65535
ANSWER_S = 5.0


def provider(start: Start) -> Findings:
    name = start.config.fleet.provider
    if start.here and name != "local":
        remedy = (
            "Start the controllers with `paceline controller`, or set fleet.provider = "
            '"local" to run the whole fleet here'
        )
        yield fail(f"fleet.provider: {name} starts the workers of this run", remedy)


def access(config: Config) -> Findings:
    host, auth = config.controller.host, config.auth
    try:
        token, root = read_token(auth), client_root(auth)
    except AuthError as error:
        yield fail(str(error), "Correct auth.token_file, or set PACELINE_TOKEN")
        return
    if not is_loopback(host):
        if token is None:
            found = f"controller.host: {host} is reachable from other machines without a token"
            yield fail(found, "To protect it, set auth.token_file, or bind 127.0.0.1")
        elif config.redis.url is None and is_loopback(config.redis.host):
            found = f"controller.host: {host} is reachable from other machines, Redis is not"
            yield fail(found, REDIS_OUT_OF_REACH.format(host=host))
    for setting, name in (("tls_cert", auth.tls_cert), ("tls_key", auth.tls_key), ("tls_ca", root)):
        if name is not None and not os.access(name, os.R_OK):
            found = f"auth.{setting}: {name} cannot be read"
            yield fail(found, "Correct the path, or its permissions")


def ports(start: Start) -> Findings:
    config = start.given
    if start.controllers:
        yield skip("the run is running: its controllers hold them")
        return
    if config is None or not config.controller.port:
        try:
            free = free_ports("127.0.0.1", 8)
            yield ok(f"free ones are found (such as {free[0]})")
        except OSError as error:
            yield fail(str(error), "End the processes that hold so many ports")
    if config is None:
        return
    record = FleetRecord.read(start.run_dir)
    # What an earlier session of the run left behind is ended, or taken over, and holds its ports.
    left = record is not None and bool(record.survivors())
    controller, rest, count = config.controller, config.rest, config.fleet.controllers
    taken_by: dict[int, str] = {}
    for setting, first, host in (
        ("controller.port", controller.port, controller.host),
        ("rest.port", rest.port if rest.enabled else 0, rest.host or controller.host),
    ):
        if not first:
            continue
        span = range(first, first + count)
        if span[-1] > LAST_PORT:
            found = (
                f"{setting}: {first} and the ports after it, one for each of {count} controllers, "
                f"go beyond {LAST_PORT}"
            )
            yield fail(found, "Choose a lower one, or 0 for free ports")
        elif shared := [port for port in span if port in taken_by]:
            found = (
                f"{setting}: port {shared[0]} is one of {taken_by[shared[0]]}'s; each controller "
                "takes the next one"
            )
            yield fail(found, "Choose another, or 0 for free ports")
        elif not left and (taken := taken_ports(host, span)):
            remedy = "End what uses it (ss -ltnp), choose another, or 0 for free ports"
            yield fail(f"{setting}: port {taken[0]} is in use on {host}", remedy)
        else:
            yield ok(f"{setting}: {span[0]} to {span[-1]} on {host}")
        taken_by |= dict.fromkeys(span, setting)


def redis(config: Config | None) -> Findings:
    settings = config.redis if config else RedisConfig()
    try:
        if settings.url is None:
            yield ok(str(find_server()))
        else:
            ensure_redis(Path(), settings)
            yield from _redis_settings(settings.url)
    except NoRedis as error:
        yield fail("redis: none can be used", str(error))


def payloads(config: Config) -> Findings:
    from paceline.masking import masked
    from paceline.payloads.open_store import check_urls

    urls = config.payloads.urls
    if not urls:
        yield ok("payloads are stored in the Redis of the journal")
        return
    try:
        asyncio.run(check_urls(urls))
    except BadInput as error:
        yield fail(str(error), "")
    else:
        yield ok(f"{', '.join(map(masked, urls))} can be written and read")


def _redis_settings(url: str) -> Findings:
    from redis import RedisError

    from paceline.masking import masked
    from paceline.redis.client import connect_sync

    shown = masked(url)
    with connect_sync(url) as client:
        try:
            server, memory = client.info("server"), client.info("memory")
            appends = bool(client.info("persistence").get("aof_enabled"))
        except RedisError as error:
            yield warn(f"{shown} answers, but refuses INFO: {error}", "Allow INFO")
            return
    version = f"{shown}: version {server.get('redis_version')}"
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and memory.get("maxmemory"):
        found = f"{version}, maxmemory-policy {policy}: it may evict the ledger"
        yield fail(found, "CONFIG SET maxmemory-policy noeviction")
    elif not appends:
        found = f"{version}, no append-only file: the ledger is lost when it ends"
        yield warn(found, "CONFIG SET appendonly yes, and in its configuration file")
    else:
        yield ok(version)


def controllers(start: Start) -> Findings:
    if not start.controllers:
        return
    try:
        token, root = read_token(start.auth), client_root(start.auth)
    except AuthError as error:
        yield fail(str(error), "Give --token-file, or set PACELINE_TOKEN")
        return
    leaders = set()
    for address in start.controllers:
        status = asyncio.run(_status(address, token, root))
        if isinstance(status, str):
            remedy = "Look at its log; check firewalls, --token-file and --tls-ca"
            yield fail(f"{address}: {status}", remedy)
            continue
        leaders.add(status.leader)
        yield ok(f"{address}: {status.phase}, leader {status.leader or '-'}")
    if leaders == {""}:
        remedy = "Look at the controllers' logs: an election takes a second or two"
        yield fail("no controller leads", remedy)


async def _status(address: str, token: str | None, root: Path | None) -> Any:
    """The status of one controller, or the reason why it did not answer."""
    import grpc.aio

    from paceline.rpc.grpc_channel import METHODS, bind_method, call_metadata, open_channel
    from paceline.v1 import admin_pb2

    # Not through ControlPlane, which takes the answer of any controller.
    channel = open_channel(address, token, tls_ca=root)
    try:
        ask = bind_method(channel, METHODS["AdminService.GetStatus"])
        metadata = call_metadata(token)
        return await ask(admin_pb2.StatusRequest(), timeout=ANSWER_S, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        reason = (error.details() or "").split("\n", 1)[0]
        return f"{error.code().name.lower().replace('_', ' ')}: {reason}"
    finally:
        await channel.close()
