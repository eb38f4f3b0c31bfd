"""Checks of a run's connections: provider, access, ports, Redis and payload stores."""

import asyncio
from pathlib import Path

from paceline.config.sections.services import RedisConfig
from paceline.errors import BadInput
from paceline.masking import masked
from paceline.observe.fleet_file import FleetRecord
from paceline.redis.server import NoRedis, ensure_redis, find_server
from paceline.rpc.addresses import is_every, is_loopback, taken_ports
from paceline.rpc.auth import client_root
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, warn

LAST_PORT = 65535


def provider(start: Start) -> Findings:
    name = start.config.fleet.provider
    if start.here and name != "local":
        remedy = (
            "Start the controllers with `paceline controller`, or set fleet.provider = "
            '"local" to run the whole fleet here'
        )
        yield fail(f"fleet.provider: {name} starts the workers of this run", remedy)


def access(start: Start) -> Findings:
    from controller.process import check_bind

    try:
        check_bind(start.config)
        client_root(start.config.auth)
    except BadInput as error:
        yield fail(str(error), "")


def ports(start: Start) -> Findings:
    config = start.config
    record = FleetRecord.read(start.run_dir)
    if record is not None and record.survivors():
        return  # they are ended, or taken over, and hold the run's ports
    controller, rest, count = config.controller, config.rest, config.fleet.controllers
    used: set[int] = set()
    for setting, first, host in (
        ("controller.port", controller.port, controller.host),
        ("rest.port", rest.port if rest.enabled else 0, rest.host or controller.host),
    ):
        span = range(first, first + count) if first else range(0)
        no_port = [port for port in span if port > LAST_PORT or port in used]
        used.update(span)
        if missing := no_port or taken_ports(host, span):
            found = f"{setting}: port {missing[0]} of {host} is in use, or there is none"
            remedy = "End what uses it (ss -ltnp), choose another, or 0 for free ports"
            yield fail(f"{found}; each controller takes the next one", remedy)


def agents(start: Start) -> Findings:
    rollout, record = start.config.rollout, FleetRecord.read(start.run_dir)
    if not rollout.openai:
        return
    host = rollout.openai_host
    port = rollout.openai_port if record is None or not record.survivors() else 0
    if taken_ports(host, [port]):
        found = f"rollout.openai_host {host!r}, openai_port {port}: nothing can listen there"
        yield fail(found, "Name an address of this machine, and a free port or 0")
    elif is_every(host) and start.here and is_loopback(start.config.controller.host):
        found = f"rollout.openai_host {host!r}: on one machine agents get 127.0.0.1 as its address"
        yield fail(found, "Name the address at which they reach this machine")


def redis(start: Start) -> Findings:
    settings = start.given.redis if start.given else RedisConfig()
    try:
        if settings.url is None:
            yield ok(str(find_server()))
        else:
            ensure_redis(Path(), settings)
            yield from _redis_settings(settings.url)
    except NoRedis as error:
        yield fail("redis: none can be used", str(error))


def _redis_settings(url: str) -> Findings:
    from redis import RedisError

    from paceline.redis.client import connect_sync

    with connect_sync(url) as client:
        try:
            info = client.info("server") | client.info("memory") | client.info("persistence")
        except RedisError as error:
            yield warn(f"{masked(url)} answers, but refuses INFO: {error}", "Allow INFO")
            return
    version = f"{masked(url)}: version {info.get('redis_version')}"
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and info.get("maxmemory"):
        found = f"{version}, maxmemory-policy {policy}: it may evict the ledger"
        yield fail(found, "CONFIG SET maxmemory-policy noeviction")
    elif not info.get("aof_enabled"):
        found = f"{version}, no append-only file: the ledger is lost when it ends"
        yield warn(found, "CONFIG SET appendonly yes, and in its configuration file")
    else:
        yield ok(version)


def payloads(start: Start) -> Findings:
    from paceline.payloads.open_store import check_urls

    urls = start.config.payloads.urls
    try:
        if urls:
            asyncio.run(check_urls(urls))
            yield ok(f"{', '.join(map(masked, urls))} can be written and read")
    except BadInput as error:
        yield fail(str(error), "")
