"""Request validation: every field of a message is checked before the ledger sees the request. An
error names the field, its fault, and the values that are allowed."""

import math
import re
from collections.abc import Mapping, Sized

from controller.ledger.commands import StatValue
from paceline.groups.invalid import Invalid
from paceline.v1 import common_pb2

WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
NAME = re.compile(r"[A-Za-z0-9_./:-]{1,64}")

MAX_WAIT_S = 30.0
MAX_TASKS = 1024
MAX_STATS = 128


def check_caller(caller: common_pb2.Caller) -> tuple[str, int]:
    if not WORKER_ID.fullmatch(caller.worker_id):
        raise Invalid(
            "caller.worker_id must be 1 to 64 letters, digits, '-', '_' or '.', beginning with a "
            f"letter or digit, not {caller.worker_id[:80]!r}"
        )
    if not 0 < caller.incarnation < 1 << 63:
        raise Invalid("caller.incarnation must be between 1 and 2^63 - 1: draw it at random")
    return caller.worker_id, caller.incarnation


def check_wait(wait_s: float) -> float:
    """Seconds for which the controller may hold the request. Raises Invalid."""
    if not 0 <= wait_s <= MAX_WAIT_S:
        raise Invalid(f"wait_s must be 0 to {MAX_WAIT_S:g}, not {wait_s}")
    return wait_s


def check_request_id(request_id: str) -> str:
    if not REQUEST_ID.fullmatch(request_id):
        raise Invalid("request_id must be 1 to 128 printable characters without blanks")
    return request_id


def check_count(items: Sized, what: str, limit: int) -> None:
    if len(items) > limit:
        raise Invalid(f"more than {limit} {what} in one request")


def check_stats(stats: Mapping[str, common_pb2.Stat]) -> dict[str, StatValue]:
    check_count(stats, "stats", MAX_STATS)
    checked = {}
    for name, stat in stats.items():
        if not NAME.fullmatch(name):
            raise Invalid(f"stat name {name[:80]!r} is malformed")
        if not (math.isfinite(stat.sum) and math.isfinite(stat.max)):
            raise Invalid(f"stat {name} is not finite: sum {stat.sum}, max {stat.max}")
        if not 0 <= stat.weight < math.inf:
            raise Invalid(f"stat {name} has weight {stat.weight}")
        checked[name] = StatValue(stat.sum, stat.weight, stat.max)
    return checked
