"""WorkerService: registration, sessions, and errors that workers report about their peers."""

import asyncio
from collections.abc import AsyncIterator

from controller.fleet.sessions import ServerSession
from controller.leader import Leader
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import CommandRefused
from controller.ledger.enums import Role
from controller.ledger.specs import WorkerSpec
from controller.replicated_controller import Controller
from controller.runtime import NotLeading
from controller.services.validation import LIFECYCLE_OF, ROLE_OF, Caller, check, from_worker
from paceline.config.changes import differences
from paceline.config.schema import Config
from paceline.errors import RefusalCode
from paceline.ids import MeshEpoch, Version
from paceline.payloads.group_limits import Invalid, check_text
from paceline.process.origins import release
from paceline.v1 import worker_pb2


@from_worker
async def register(
    leader: Leader, caller: Caller, request: worker_pb2.RegisterRequest
) -> worker_pb2.RegisterReply:
    context = leader.context
    check_scorer(request, context.config)
    check_seat(leader, request)
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
    await leader.execute(
        cmd.register(
            WorkerSpec(
                *caller,
                role=ROLE_OF[request.role],
                host=request.host,
                pid=request.pid,
                tensor_host=request.tensor_host,
                ranks=request.ranks,
                state_version=Version(request.state_version),
                scorer=request.scorer,
                address=request.address,
                cgroup=request.cgroup,
                memory_kills=request.memory_kills if request.cgroup else -1,
                origins=dict(request.origins),
                seat=request.seat,
            )
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
    check(first)
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
            check(following)
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
            cmd.observe(
                *current.key,
                reported=LIFECYCLE_OF[report.lifecycle],
                state_version=Version(report.state_version),
                loaded_version=Version(report.loaded_version),
                parity_failures=report.parity_failures,
                parity_detail=report.parity_detail,
                load_failures=report.load_failures,
                load_detail=report.load_detail,
                stored_weights=report.stored_weights,
            )
        )
        seat, stays = report.seat, leader.ledger.state.fleet.current(*current.key) is not None
        if report.HasField("seat") and stays:
            said = cmd.report_seat(*current.key, seat.grant, seat.parked, report.seen_term)
            leader.decide(said)
    directive = leader.sessions.refresh(current)
    if directive is not None:
        await leader.group_commit.durable()
    leader.sessions.send(current, directive)


@from_worker
async def report_peer_error(
    leader: Leader, caller: Caller, request: worker_pb2.PeerError
) -> worker_pb2.PeerErrorReply:
    if request.is_link:
        await leader.execute(cmd.break_link(*caller, request.epoch))
        return worker_pb2.PeerErrorReply()
    await leader.execute(cmd.break_mesh(*caller, MeshEpoch(request.epoch), request.detail[:512]))
    # An error of an earlier epoch is no evidence about the members of the present one.
    if request.epoch == leader.ledger.state.fleet.mesh_epoch:
        leader.liveness.peer_error(request.epoch)
    return worker_pb2.PeerErrorReply()


def check_scorer(request: worker_pb2.RegisterRequest, config: Config) -> None:
    """Raises Invalid unless exactly a scorer names its scorer and its address."""
    if ROLE_OF[request.role] is not Role.SCORER:
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


def check_seat(leader: Leader, request: worker_pb2.RegisterRequest) -> None:
    """Raises Invalid unless this run's workers take turns, this one may, and the other workers of
    its devices are on the same host. One that may be dead is not asked for."""
    seat, limits = request.seat, leader.context.config.fleet
    device, _, scorer = seat.partition(":")
    if not seat:
        return
    if limits.sharing == "none":
        raise Invalid(f"seat {seat[:64]!r}: fleet.sharing is none, no worker takes turns")
    if (ROLE_OF[request.role] is Role.SCORER) != bool(scorer):
        raise Invalid(f"{seat}: a scorer's seat is named PAIR:SCORER, and that of a pair PAIR")
    if scorer and limits.sharing != "turns":
        raise Invalid(f'{seat}: a scorer shares devices with fleet.sharing = "turns" alone')
    for other in leader.ledger.state.fleet.workers.values():
        there = other.seat.partition(":")[0]
        if not other.alive or there != device or other.worker_id == request.caller.worker_id:
            continue
        found = leader.liveness.prognosis(*other.who, leader.clock.monotonic())
        heard = found is not None and not found.suspect and found.silent_s < limits.lease_ttl_s / 2
        if heard and other.host != request.host:
            raise Invalid(
                f"{device} has devices of one host: {other.worker_id} is on {other.host}, and "
                f"{request.caller.worker_id} on {request.host[:64]}. Start both on one host"
            )
