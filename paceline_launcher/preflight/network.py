"""Checks of a run's connections: provider, access, Redis and payload stores."""

import asyncio
from pathlib import Path

from paceline.config.sections.services import RedisConfig
from paceline.errors import BadInput
from paceline.masking import masked
from paceline.redis.server import NoRedis, ensure_redis, find_server
from paceline.rpc.auth import client_root
from paceline_launcher.preflight.findings import Findings, Start, fail, ok, warn


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
    from paceline.payloads.open_store import PAYLOADS, check_urls
    from paceline.weights.weight_store import SETTING

    config = start.config
    weights = [] if config.weights.url is None else [config.weights.url]
    for setting, urls in ((PAYLOADS, config.payloads.urls), (SETTING, weights)):
        try:
            if urls:
                asyncio.run(check_urls(urls, setting))
                yield ok(f"{', '.join(map(masked, urls))} can be written and read")
        except BadInput as error:
            yield fail(str(error), "")
