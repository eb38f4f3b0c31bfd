"""Clock skew between the hosts of a run, and whether their controllers answer.

As with NTP, a host's time is compared with the middle of the round trip, and half of the round trip
is the uncertainty. Leases do not depend on clocks; ages and times in the events do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.schema import Config
from paceline.config.sections.services import AuthConfig
from paceline.rpc.auth import AuthError, client_root, read_token
from paceline_launcher.preflight.check import Check, fail, judge, ok

SKEW_WARN_S = 0.5
SKEW_FAIL_S = 5.0
"""Status pages show a controller as silent after this time: such a skew makes a live one look dead.
"""
ANSWER_S = 5.0
TRIES = 3
REMEDY = "Synchronise the hosts' clocks: chronyc tracking, or timedatectl set-ntp true"


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Seconds by which a clock is ahead of ours, and the largest error of that."""

    ahead_s: float
    uncertain_s: float

    @classmethod
    def of(cls, asked: float, told: float, heard: float) -> ClockReading:
        """Unix seconds: ours before the question, theirs, ours after the answer."""
        return cls(told - (asked + heard) / 2, (heard - asked) / 2)

    @property
    def certain_s(self) -> float:
        """Skew that the uncertainty cannot explain."""
        return max(0.0, abs(self.ahead_s) - self.uncertain_s)


def check_hosts(
    config: Config | None, auth: AuthConfig, addresses: Sequence[str]
) -> Iterator[Check]:
    """One check for each controller, and one for each clock but ours."""
    if config is not None and config.redis.url is not None:
        reading = _redis_clock(config.redis.url)
        if reading is not None:
            yield clock_check("Redis", reading)
    if not addresses:
        return
    try:
        token, root = read_token(auth), client_root(auth)
    except AuthError as error:
        yield fail("controllers", str(error), "Give --token-file, or set PACELINE_TOKEN")
        return
    leaders = set()
    for address, found in zip(addresses, asyncio.run(_ask(addresses, token, root)), strict=True):
        if isinstance(found, str):
            remedy = "Look at its log; check firewalls, --token-file and --tls-ca"
            yield fail("controllers", f"{address}: {found}", remedy)
            continue
        reading, status = found
        leaders.add(status.leader)
        yield ok("controllers", f"{address}: {status.phase}, leader {status.leader or '-'}")
        if status.clock_s:
            yield clock_check(address, reading)
    if leaders == {""}:
        remedy = "Look at the controllers' logs: an election takes a second or two"
        yield fail("controllers", "no controller leads", remedy)


def clock_check(whose: str, reading: ClockReading) -> Check:
    found = (
        f"{whose}: {reading.ahead_s * 1e3:+.0f} ms against this host, "
        f"± {reading.uncertain_s * 1e3:.0f} ms"
    )
    skew_s = reading.certain_s
    return judge("clock", found, REMEDY, warns=skew_s >= SKEW_WARN_S, fails=skew_s >= SKEW_FAIL_S)


def _redis_clock(url: str) -> ClockReading | None:
    import redis

    from paceline.redis.client import connect_sync

    readings = []
    try:
        with connect_sync(url) as client:
            client.ping()  # the connection is made before the clock is asked
            for _ in range(TRIES):
                asked = time.time()
                seconds, micros = client.time()
                readings.append(ClockReading.of(asked, seconds + micros / 1e6, time.time()))
    except (redis.RedisError, OSError, ValueError):
        return None
    return _most_certain(readings)


def _most_certain(readings: Sequence[ClockReading]) -> ClockReading:
    return min(readings, key=lambda r: r.uncertain_s)


async def _ask(addresses: Sequence[str], token: str | None, root: Any) -> list[Any]:
    """(ClockReading, status) of each controller, or the reason why it did not answer."""
    return await asyncio.gather(*(_ask_one(address, token, root) for address in addresses))


async def _ask_one(address: str, token: str | None, root: Any) -> Any:
    import grpc.aio

    from paceline.rpc.grpc_channel import METHODS, bind_method, call_metadata, open_channel
    from paceline.v1 import admin_pb2

    # Not through ControlPlane, which takes the answer of any controller.
    channel = open_channel(address, tls_ca=root)
    try:
        ask = bind_method(channel, METHODS["AdminService.GetStatus"])
        readings = []
        for _ in range(TRIES):
            asked = time.time()
            status = await ask(
                admin_pb2.StatusRequest(), timeout=ANSWER_S, metadata=call_metadata(token)
            )
            readings.append(ClockReading.of(asked, status.clock_s, time.time()))
        return _most_certain(readings), status
    except grpc.aio.AioRpcError as error:
        said = (error.details() or "").split("\n", 1)[0]
        return f"{error.code().name.lower().replace('_', ' ')}: {said}"
    finally:
        await channel.close()
