"""WorkerService: registration, sessions, and errors that workers report about their peers."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence

from controller.fleet.sessions import ServerSession
from controller.leader import Leader
from controller.ledger.commands import BreakLink, BreakMesh, CommandRefused, Observe, Register
from controller.ledger.enums import TRAITS, Lifecycle
from controller.proto_encoding import ROLES
from controller.replicated_controller import Controller
from controller.runtime import NotLeading
from controller.services.validation import MAX_TASKS, check_caller, check_count
from paceline.config.changes import differences
from paceline.config.schema import Config
from paceline.errors import RefusalCode
from paceline.ids import MeshEpoch, Version
from paceline.payloads.group_limits import Invalid, check_text
from paceline.process.origins import release
from paceline.process.waits import MOST_TEXT
from paceline.v1 import common_pb2, worker_pb2

MAX_GAUGES = 128
MAX_ORIGINS = 64
MAX_RANKS = 4096
MAX_WAITS = 64
MAX_AGE_S = 1e9
NO_ROLE = "role must be policy, rollout or scorer"
VERSIONS = 1 << 53
"""Limit of reported versions and terms: a rollback continues after the highest one."""

_ROLES = {value: role for role, value in ROLES.items()}
_LIFECYCLES = {
    worker_pb2.Lifecycle.Value(f"LIFECYCLE_{stage.name}"): stage
    for stage in Lifecycle
    if stage is not Lifecycle.DEAD
}


async def register(
    controller: Controller, request: worker_pb2.RegisterRequest
) -> worker_pb2.RegisterReply:
    leader = controller.leading()
    context = leader.context
    caller = check_caller(request.caller)
    if request.role not in _ROLES:
        raise Invalid(NO_ROLE)
    check_scorer(request, context.config)
    if not 1 <= request.ranks <= MAX_RANKS:
        raise Invalid(f"ranks must be 1 to {MAX_RANKS}, not {request.ranks}")
    if request.config_digest != context.config_digest:
        raise CommandRefused(
            RefusalCode.FENCED,
            "the worker's config differs from the run's: "
            f"{differences(context.config_json, request.config_json)}. Start every process of a "
            "run with the same config",
        )
    if request.release not in ("", release()):
        raise CommandRefused(
            RefusalCode.FENCED,
            f"the worker runs release {request.release[:64]!r} of Paceline, the controllers "
            f"{release()!r}. Install the same release for every process of a run",
        )
    check_count(request.origins, "origins", MAX_ORIGINS)
    origins = {
        check_text(name, "origins", 256): check_text(digest, "origins", 64)
        for name, digest in request.origins.items()
    }
    if request.state_version < -1:
        raise Invalid("state_version must be -1 or a version")
    await leader.execute(
        Register(
            *caller,
            role=_ROLES[request.role],
            host=check_text(request.host, "host", 256),
            pid=request.pid,
            tensor_host=check_text(request.tensor_host, "tensor_host", 256),
            ranks=request.ranks,
            state_version=Version(request.state_version),
            scorer=request.scorer,
            address=request.address,
            cgroup=check_text(request.cgroup, "cgroup", 1024),
            memory_kills=request.memory_kills if request.cgroup else -1,
            stalled_s=_check_age(request.stalled_s, "stalled_s"),
            origins=origins,
        )
    )
    leader.liveness.heard(*caller, leader.clock.monotonic())
    fleet = context.config.fleet
    return worker_pb2.RegisterReply(
        run_id=context.config.run.name,
        rendezvous_url=context.stores.worker_url,
        version=leader.version,
        heartbeat_s=fleet.heartbeat_s,
        lease_ttl_s=fleet.lease_ttl_s,
        run_dir=str(context.run_dir),
        payload_urls=context.stores.payload_urls,
        decodes_texts=context.texts.available,
    )


async def session(
    controller: Controller, reports: AsyncIterator[worker_pb2.Report]
) -> AsyncIterator[worker_pb2.Directive]:
    leader = controller.leading()
    if not leader.active:
        raise NotLeading("no lease at the moment")
    first = await anext(reports, None)
    if first is None:
        return
    check_report(first)
    leader.check_term(first.seen_term)
    current = leader.sessions.open(first)
    reader = asyncio.create_task(_read(leader, current, first, reports))
    try:
        while True:
            await current.due.wait()
            current.due.clear()
            if current.closed:
                break
            if current.latest is not None:
                yield current.latest
        if reader.done():
            # If a report was malformed or refused, this raises the reason.
            reader.result()
        if not leader.active:
            raise NotLeading("stepped down")
    finally:
        reader.cancel()
        if leader.sessions.close(current):
            leader.session_ended(current)


async def _read(
    leader: Leader,
    current: ServerSession,
    report: worker_pb2.Report,
    reports: AsyncIterator[worker_pb2.Report],
) -> None:
    try:
        while True:
            await _observe(leader, current, report)
            following = await anext(reports, None)
            if following is None:
                return
            check_report(following)
            leader.check_term(following.seen_term)
            if following.caller != report.caller:
                raise Invalid("a session belongs to one incarnation of one worker")
            if following.seq > report.seq:
                report = following
    finally:
        current.close()


async def _observe(leader: Leader, current: ServerSession, report: worker_pb2.Report) -> None:
    """Answers one report, at once unless its directive must become durable first."""
    current.report = report
    if not leader.active:
        # Nothing can be decided now. Repeating the directive shows that this controller lives.
        leader.liveness.observe(report, leader.clock.monotonic())
        leader.sessions.send(current, None)
        return
    if leader.ledger.state.fleet.current(*current.key) is not None:
        leader.liveness.observe(report, leader.clock.monotonic())
        leader.decide(
            Observe(
                *current.key,
                lifecycle=_LIFECYCLES[report.lifecycle],
                state_version=Version(report.state_version),
                loaded_version=Version(report.loaded_version),
                parity_failures=report.parity_failures,
                parity_detail=report.parity_detail,
                load_failures=report.load_failures,
                load_detail=report.load_detail,
            )
        )
    directive = leader.sessions.refresh(current)
    if directive is not None:
        await leader.group_commit.durable()
    leader.sessions.send(current, directive)


async def report_peer_error(
    controller: Controller, request: worker_pb2.PeerError
) -> worker_pb2.PeerErrorReply:
    leader = controller.leading()
    caller = check_caller(request.caller)
    if request.epoch < 1:
        raise Invalid("epoch counts from 1")
    detail = request.detail[:512]
    if request.is_link:
        await leader.execute(BreakLink(*caller, request.epoch, detail))
        return worker_pb2.PeerErrorReply()
    await leader.execute(BreakMesh(*caller, MeshEpoch(request.epoch), detail))
    # An error of an earlier epoch is no evidence about the members of the present one.
    if request.epoch == leader.ledger.state.fleet.mesh_epoch:
        leader.liveness.peer_error(request.epoch)
    return worker_pb2.PeerErrorReply()


def _check_age(seconds: float, name: str) -> float:
    """Raises Invalid unless it is a length of time."""
    if not 0 <= seconds < MAX_AGE_S:
        raise Invalid(f"{name} is in seconds, 0 or more")
    return seconds


def check_scorer(request: worker_pb2.RegisterRequest, config: Config) -> None:
    """Raises Invalid unless exactly a scorer names its scorer and its address."""
    if not TRAITS[_ROLES[request.role]].serves:
        if request.scorer or request.address:
            raise Invalid("scorer and address are those of a scorer")
        return
    known = config.scorers.by_name
    if request.scorer not in known:
        raise Invalid(
            f"the config has no scorer {request.scorer[:64]!r}: one of {', '.join(known) or 'none'}"
        )
    host, _, port = check_text(request.address, "address", 300).rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise Invalid(f"address {request.address[:300]!r} is not host:port")


def check_report(report: worker_pb2.Report) -> None:
    check_caller(report.caller)
    if report.lifecycle not in _LIFECYCLES:
        raise Invalid("report.lifecycle must be starting, running, draining or stopped")
    if len(report.held_leases) > MAX_TASKS or len(report.link_epochs) > MAX_TASKS:
        raise Invalid(f"a report names at most {MAX_TASKS} leases and links")
    if len(report.gauges) > MAX_GAUGES:
        raise Invalid(f"a report has at most {MAX_GAUGES} gauges")
    if not 0 <= report.seen_term < VERSIONS:
        raise Invalid(f"report.seen_term = {report.seen_term} is no term")
    for version in (report.state_version, report.loaded_version):
        if not -1 <= version < VERSIONS:
            raise Invalid(f"{version} is no version: -1 for none, or 0 to {VERSIONS - 1}")
    for name, value in report.gauges.items():
        if not math.isfinite(value) or len(name) > 64:
            raise Invalid(f"gauge {name[:64]} = {value}")
    for name in ("parity", "load"):
        count = getattr(report, f"{name}_failures")
        if not 0 <= count < VERSIONS:
            raise Invalid(f"report.{name}_failures = {count} is no count")
        check_text(getattr(report, f"{name}_detail"), f"{name}_detail", 512)
    check_text(report.activity, "activity", 256)
    check_waits(report.waits)


def check_waits(waits: Sequence[worker_pb2.Wait]) -> None:
    if len(waits) > MAX_WAITS:
        raise Invalid(f"a report names at most {MAX_WAITS} waits")
    for wait in waits:
        check_text(wait.what, "wait.what", MOST_TEXT)
        check_text(wait.of, "wait.of", MOST_TEXT)
        if not (0 <= wait.age_s < MAX_AGE_S and 0 <= wait.limit_s < MAX_AGE_S):
            raise Invalid("a wait's age_s and limit_s are seconds, 0 or more")


async def report_waits(
    controller: Controller, request: worker_pb2.WaitsReport
) -> worker_pb2.WaitsReply:
    """Any controller remembers it: there may be no leader, and it changes nothing."""
    check_caller(common_pb2.Caller(worker_id=request.worker_id, incarnation=1))
    if request.role not in _ROLES:
        raise Invalid(NO_ROLE)
    check_text(request.host, "host", 256)
    check_waits(request.waits)
    controller.without_session.note(request, controller.clock.monotonic())
    return worker_pb2.WaitsReply()
