"""Request validation: the possible values of every field, by message, before the ledger sees a
request. An error names the field, its fault, and the values that are allowed."""

import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import cache, wraps
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor

from controller.directives import E
from controller.leader import Leader
from controller.ledger.enums import GroupFault, Lifecycle, ReturnKind, Role, SuspendStage
from controller.ledger.specs import StatValue
from controller.replicated_controller import Controller
from paceline.observe.groups import SORTS
from paceline.observe.vocabulary import FaultCause
from paceline.payloads.group_limits import Invalid
from paceline.v1 import admin_pb2, common_pb2, policy_pb2, rollout_pb2, worker_pb2
from paceline.weights.weight_store import NAME as STORED
from paceline.worker_pools import ROLES as POOL_ROLES
from paceline.worker_pools import TRAINING, role_of

R = TypeVar("R")
Caller = tuple[str, int]
"""Worker id and incarnation."""
Rule = Callable[[Any], str]
"""Returns the fault of a value; empty if it is possible."""

NAME = re.compile(r"[A-Za-z0-9_./:-]{1,64}")
MAX_TASKS = 1024
MAX_WORKERS = 100_000
LARGEST = (1 << 53) - 1
"""Largest version and term that is reported: a rollback continues after the highest one."""


def _by_value(words: type[E], wire: Any, prefix: str, without: E | None = None) -> dict[Any, E]:
    """The member of ``words`` that each value of a protobuf enum stands for."""
    return {wire.Value(f"{prefix}_{word.name}"): word for word in words if word is not without}


ROLE_OF = _by_value(Role, common_pb2.Role, "ROLE")
LIFECYCLE_OF = _by_value(Lifecycle, worker_pb2.Lifecycle, "LIFECYCLE", Lifecycle.DEAD)
RETURN_OF = _by_value(ReturnKind, rollout_pb2.ReturnKind, "RETURN_KIND")
FAULT_OF = _by_value(GroupFault, policy_pb2.GroupFault, "GROUP_FAULT", GroupFault.KILLED_TRAINERS)
STAGE_OF = _by_value(SuspendStage, admin_pb2.SuspendStage, "SUSPEND_STAGE")

# ---- fields -------------------------------------------------------------------------------


def between(least: float, most: float) -> Rule:
    # A NaN makes both comparisons false.
    return lambda value: "" if least <= value <= most else f"must be {least} to {most}, not {value}"


def text(most: int) -> Rule:
    return lambda value: f"is longer than {most} characters" if len(value) > most else ""


def written(pattern: str, allowed: str) -> Rule:
    matches = re.compile(pattern).fullmatch
    return lambda value: "" if matches(value) else f"must be {allowed}, not {value[:80]!r}"


def among(values: Collection[Any], allowed: str) -> Rule:
    return lambda value: "" if value in values else f"must be {allowed}, not {str(value)[:64]!r}"


def few(most: int, rule: Rule = lambda item: "") -> Rule:
    """At most so many items of a list, or keys of a mapping, each by ``rule``."""

    def fault(items: Any) -> str:
        if len(items) > most:
            return f"has more than {most} entries"
        return next(filter(None, map(rule, items)), "")

    return fault


def _gauges(gauges: Mapping[str, float]) -> str:
    infinite = [name for name, value in gauges.items() if not math.isfinite(value)]
    return few(128, text(64))(gauges) or (f"{infinite[0]} is not finite" if infinite else "")


def _pools(counts: Mapping[str, int]) -> str:
    for pool, count in counts.items():
        known = pool == TRAINING or role_of(pool) in POOL_ROLES
        if not known or len(pool) > 64 or not 0 <= count <= MAX_WORKERS:
            return f"{pool[:64]} = {count}: write policy, rollout or scorer:NAME, and 0 or more"
    return ""


def _origins(origins: Mapping[str, str]) -> str:
    return few(64, text(256))(origins) or few(64, text(64))(origins.values())


def _faults(message: Any) -> str:
    for field, rule in _rules_of(message.DESCRIPTOR):
        if fault := rule(getattr(message, field)):
            return f".{field} {fault}"
    return ""


_VERSION = between(-1, LARGEST)
_COUNT = between(0, LARGEST)
_SECONDS = between(0, 1e9)
_WORKER_ID = written(
    r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}",
    "1 to 64 letters, digits, '-', '_' or '.', beginning with a letter or digit",
)
RULES: dict[str, Rule] = {
    "Caller.incarnation": between(1, (1 << 63) - 1),
    "CheckpointRequest.step": between(1, LARGEST),
    "FaultReport.name": _WORKER_ID,
    "GroupsRequest.grep": text(256),
    "GroupsRequest.limit": between(0, 500),
    "GroupsRequest.sort": among(["", *SORTS], f"one of {', '.join(SORTS)}"),
    "PeerError.epoch": between(1, LARGEST),
    "RegisterRequest.seat": written(
        r"([A-Za-z0-9][A-Za-z0-9_.:/-]{0,127})?",
        "at most 128 letters, digits, '-', '_', '.', ':' or '/', beginning with a letter or digit",
    ),
    "RejectRequest.groups": few(65536),
    "Report.seat": _faults,
    "PeerError.detail": text(1 << 20),  # As much of it as is kept is cut off by its handler
    "RegisterRequest.config_json": text(1 << 20),
    "RejectRequest.detail": text(4096),
    "ReturnedTask.detail": text(1 << 20),
    "ReturnedTask.kind": among(RETURN_OF, "drop, failed or hand_back"),
    "ReturnedTask.reason": text(64),
    "SubmitRequest.groups": few(1024),
    "age_s": _SECONDS,
    "caller": _faults,
    "cause": among(["", *FaultCause], f"one of {', '.join(FaultCause)}"),
    "desired": _pools,
    "expected": _pools,
    "fault": among(FAULT_OF, "one that a replica can report"),
    "gauges": _gauges,
    "grant": _COUNT,
    "held_leases": few(MAX_TASKS),
    "lease_seq": between(1, math.inf),
    "lifecycle": among(LIFECYCLE_OF, "starting, running, draining or stopped"),
    "limit_s": _SECONDS,
    "link_epochs": few(MAX_TASKS),
    "load_failures": _COUNT,
    "loaded_version": _VERSION,
    "max_tasks": between(1, MAX_TASKS),
    "origins": _origins,
    "parity_failures": _COUNT,
    "ranks": between(1, 4096),
    "request_id": written(r"[\x21-\x7e]{1,128}", "1 to 128 printable characters without blanks"),
    "role": among(ROLE_OF, "policy, rollout or scorer"),
    "seconds": _SECONDS,
    "seen_term": _COUNT,
    "settings": few(64, text(128)),
    "size_bytes": _COUNT,
    "stage": among(STAGE_OF, "a stage of a suspension"),
    "state_version": _VERSION,
    "stored_weights": written(f"({STORED})?", "a name of stored weights"),
    "tasks": few(MAX_TASKS, _faults),
    "wait_s": between(0, 30),
    "waits": few(64, _faults),
    "weights_digest": written(r"\S{1,128}", "1 to 128 characters"),
    "worker_id": _WORKER_ID,
}
"""By the name of the field, in all messages or in one. Any other text has at most 1,024
characters."""


@cache
def _rules_of(message: Descriptor) -> list[tuple[str, Rule]]:
    rules = []
    for field in message.fields:
        rule = RULES.get(f"{message.name}.{field.name}", RULES.get(field.name))
        if rule is None and field.type == field.TYPE_STRING and not field.is_repeated:
            rule = text(1024)
        if rule is not None:
            rules.append((field.name, rule))
    return rules


def check(request: Any) -> None:
    """Raises Invalid unless every field of ``request`` has a possible value."""
    if fault := _faults(request):
        raise Invalid(f"{request.DESCRIPTOR.name}{fault}")


def from_worker(
    handler: Callable[[Leader, Caller, Any], Awaitable[R]],
) -> Callable[[Controller, Any], Awaitable[R]]:
    """Handler of a worker's request, which only a leader answers, and only if it is possible."""

    @wraps(handler)
    async def handle(controller: Controller, request: Any) -> R:
        leader = controller.leading()
        check(request)
        caller = request.caller.worker_id, request.caller.incarnation
        return await handler(leader, caller, request)

    return handle


# ---- statistics ---------------------------------------------------------------------------


def check_stats(stats: Mapping[str, common_pb2.Stat]) -> dict[str, StatValue]:
    if fault := few(128)(stats):
        raise Invalid(f"stats {fault}")
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
